//! SmolLM2-135M, quantised: candle's own Llama beside the same with headwise's attention, generating
//! greedily.
//!
//! ```sh
//! cargo run --release -p headwise-candle --example smollm2 -- MODEL.gguf TEXT [PROMPT [GENERATE [ROUNDS]]]
//! ```
//!
//! PROMPT and GENERATE count tokens (1000 and 64), of at most 4096 together; the prompt is the file TEXT,
//! over and over if it is short. Fails unless both generate the same.

mod llama;

use std::error::Error;
use std::fs::File;
use std::time::Instant;

use candle_core::quantized::gguf_file;
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use candle_core::{D, Device, IndexOp, Tensor};
use candle_transformers::models::quantized_llama::{MAX_SEQ_LEN, ModelWeights};
use tokenizers::Tokenizer;

const USAGE: &str = "usage: smollm2 MODEL.gguf TEXT [PROMPT [GENERATE [ROUNDS]]]";

/// What a model does with tokens from a position on: the logits behind the last one.
type Forward<'a> = &'a mut dyn FnMut(&Tensor, usize) -> candle_core::Result<Tensor>;

/// The tokens generated, and tokens a second of the prompt and of each step.
struct Run {
    tokens: Vec<u32>,
    prompt: f64,
    decode: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or(USAGE)?;
    let text = std::fs::read_to_string(arguments.next().ok_or(USAGE)?)?;
    let mut count = |default| arguments.next().map_or(Ok(default), |text| text.parse::<usize>());
    let (prompt_len, generate, rounds) = (count(1000)?, count(64)?, count(3)?);
    if prompt_len == 0 || generate == 0 || rounds == 0 || prompt_len + generate > MAX_SEQ_LEN {
        return Err(format!("counts above 0, and at most {MAX_SEQ_LEN} tokens").into());
    }

    let mut file = File::open(&path)?;
    let content = gguf_file::Content::read(&mut file)?;
    let tokenizer = Tokenizer::from_gguf(&content)?;
    let mut ours = llama::Llama::load(&content, &mut file, prompt_len + generate)?;
    let mut theirs = ModelWeights::from_gguf(content, &mut file, &Device::Cpu)?;

    let encoding = tokenizer.encode(text, false).map_err(|error| error.to_string())?;
    let prompt: Vec<u32> = encoding.get_ids().iter().copied().cycle().take(prompt_len).collect();
    if prompt.is_empty() {
        return Err("the text is empty".into());
    }

    let mut runs = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        theirs.clear_kv_cache();
        runs[0].push(run(&mut |tokens, start| theirs.forward(tokens, start), &prompt, generate)?);
        ours.reset();
        runs[1].push(run(&mut |tokens, start| ours.forward(tokens, start), &prompt, generate)?);
    }
    let median = |runs: &[Run], rate: fn(&Run) -> f64| {
        let mut rates: Vec<f64> = runs.iter().map(rate).collect();
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    };
    println!("{prompt_len} tokens of prompt, {generate} generated; tokens a second, medians of {rounds}");
    let of = |rate| [&runs[0], &runs[1]].map(|runs| median(runs, rate));
    for (what, [candle, headwise]) in [("prompt", of(|run| run.prompt)), ("decode", of(|run| run.decode))] {
        println!("{what}: candle {candle:.1}, headwise {headwise:.1}, {:.2}x", headwise / candle);
    }
    let first = &runs[0][0].tokens;
    println!("{:?}", tokenizer.decode(first, false).map_err(|error| error.to_string())?);
    if let Some(other) = runs.iter().flatten().find(|run| run.tokens != *first) {
        return Err(format!("candle generated {first:?}, headwise {:?}", other.tokens).into());
    }
    println!("the same tokens from both");
    Ok(())
}

/// The prompt, then the likeliest token again and again.
fn run(forward: Forward, prompt: &[u32], generate: usize) -> candle_core::Result<Run> {
    let likeliest = |logits: Tensor| logits.i(0)?.argmax(D::Minus1)?.to_scalar::<u32>();
    let start = Instant::now();
    let mut tokens = vec![likeliest(forward(&Tensor::new(prompt, &Device::Cpu)?.unsqueeze(0)?, 0)?)?];
    let prompt_rate = prompt.len() as f64 / start.elapsed().as_secs_f64();
    let start = Instant::now();
    while tokens.len() < generate {
        let last = Tensor::new(&tokens[tokens.len() - 1..], &Device::Cpu)?.unsqueeze(0)?;
        tokens.push(likeliest(forward(&last, prompt.len() + tokens.len() - 1)?)?);
    }
    let decode = (generate - 1) as f64 / start.elapsed().as_secs_f64();
    Ok(Run { tokens, prompt: prompt_rate, decode })
}
