//! smoke
use headwise::*;
#[test]
fn smoke() {
    let (b, hq, hk, lq, lk, d, dv) = (2, 4, 2, 37, 150, 40, 24);
    let wave = |n: usize, a: f32| (0..n).map(|i| (i as f32 * a).sin()).collect::<Vec<f32>>();
    let (q, k, v) = (wave(b * hq * lq * d, 0.7), wave(b * hk * lk * d, 0.31), wave(b * hk * lk * dv, 0.57));
    let mask: Vec<bool> = (0..lq * lk).map(|i| i % 3 != 0).collect();
    for level in Level::available() {
        for kind in 0..6 {
            let vq = View::bhld(&q, [b, hq, lq, d]).unwrap();
            let vk = View::bhld(&k, [b, hk, lk, d]).unwrap();
            let vv = View::bhld(&v, [b, hk, lk, dv]).unwrap();
            let mut at = Attention::new().level(level);
            if kind == 1 {
                at = at.causal();
            }
            if kind == 2 {
                at = at.causal().position(Position::TopLeft).window(Some(5), None);
            }
            if kind == 3 {
                at = at.mask(View::compact(&mask, &[lq, lk]).unwrap());
            }
            if kind == 4 {
                at = at.softcap(0.5).slopes(&[0.1, 0.2, 0.3, 0.4]);
            }
            if kind == 5 {
                at = at.sinks(&[0.1, 2.0, 0.3, 0.4]).gates(&[1.0, 0.0, 0.5, 0.4]);
            }
            let mut out = vec![f32::NAN; b * hq * lq * dv];
            let mut lse = vec![f32::NAN; b * hq * lq];
            at.run_with_lse(vq, vk, vv, ViewMut::bhld(&mut out, [b, hq, lq, dv]).unwrap(), &mut lse).unwrap();
            let r = reference::attention(vq, vk, vv, at.terms()).unwrap();
            let e = out
                .iter()
                .zip(&r.out)
                .map(|(a, b)| (*a as f64 - b).abs())
                .fold(0.0, |a: f64, b| if b.is_nan() { f64::INFINITY } else { a.max(b) });
            let el = lse
                .iter()
                .zip(&r.lse)
                .map(|(a, b)| if *a as f64 == *b { 0.0 } else { (*a as f64 - b).abs() })
                .fold(0.0, |a: f64, b| if b.is_nan() { f64::INFINITY } else { a.max(b) });
            println!("{level} kind {kind}: {e:.2e} lse {el:.2e} {}", at.plan(vq, vk, vv).unwrap().describe());
        }
    }
}
