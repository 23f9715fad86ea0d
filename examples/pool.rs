//! Threads of one's own: a call uses the rayon pool that it runs in, and none but the calling thread with
//! `sequential`. Whichever it is, the result is the same to the bit.
//!
//! `cargo run --release --example pool`

use std::error::Error;

use headwise::{Attention, View, ViewMut};
use rayon::ThreadPoolBuilder;

fn main() -> Result<(), Box<dyn Error>> {
    let (heads, tokens, d) = (8, 256, 64);
    let numbers =
        |seed: f32| -> Vec<f32> { (0..heads * tokens * d).map(|i| (i as f32 * seed).sin()).collect() };
    let (q, k, v) = (numbers(0.7), numbers(1.1), numbers(1.3));
    let shape = [1, heads, tokens, d];
    let (q, k, v) = (View::bhld(&q, shape)?, View::bhld(&k, shape)?, View::bhld(&v, shape)?);
    let run = |attention: Attention<'_>| -> Result<Vec<f32>, headwise::Error> {
        let mut out = vec![0.0; heads * tokens * d];
        attention.run(q, k, v, ViewMut::bhld(&mut out, shape)?)?;
        Ok(out)
    };

    let pool = ThreadPoolBuilder::new().num_threads(3).thread_name(|i| format!("attention {i}")).build()?;
    let in_pool = pool.install(|| run(Attention::new()))?;
    println!("{}", pool.install(|| Attention::new().plan(q, k, v))?.describe());

    let alone = run(Attention::new().sequential())?;
    println!("{}", Attention::new().sequential().plan(q, k, v)?.describe());
    assert!(in_pool == alone && alone.iter().any(|x| *x != 0.0));
    Ok(())
}
