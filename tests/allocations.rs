//! A call allocates nothing once its threads, or the workspace lent to it, have met its like: a server calls
//! every few milliseconds. A workspace dropped leaves nothing behind.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering};

use headwise::layer::{
    AttentionBlock, Linear, MultiHead, MultiHeadConfig, Norm, NormOrder, Pairing, Rotary, Tokens,
    WeightLayout, Workspace,
};
use headwise::{Attention, CacheShape, KvCache, View, ViewMut};
use rayon::{ThreadPool, ThreadPoolBuilder};

/// The system's memory, how often any thread has asked for some, and how many bytes are out.
struct Counted;

static COUNT: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicIsize = AtomicIsize::new(0);

#[global_allocator]
static MEMORY: Counted = Counted;

// SAFETY: the system's allocator does it all.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        BYTES.fetch_add(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: the caller's.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        BYTES.fetch_add(size as isize - layout.size() as isize, Ordering::Relaxed);
        // SAFETY: the caller's.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

/// How often memory is asked for meanwhile.
fn count(f: impl FnOnce()) -> usize {
    let before = COUNT.load(Ordering::Relaxed);
    f();
    COUNT.load(Ordering::Relaxed) - before
}

/// One test, so that nothing else allocates meanwhile.
#[test]
fn a_third_call_allocates_nothing() {
    let [b, hq, hk, d, lq, lk, size] = [3, 8, 2, 64, 96, 2400, 48];
    let wave = |n: usize| -> Vec<f32> { (0..n).map(|i| (i as f32 * 0.1).sin()).collect() };
    let (q, k, v) = (wave(b * hq * lq * d), wave(b * hk * lk * d), wave(b * hk * lk * d));
    let (mut out, mut lse) = (wave(b * hq * lq * d), wave(b * hq * lq));
    let (slopes, sinks, mask) = (wave(hq), wave(hq), vec![true; lk]);
    // One token of each of three sequences, or prompts of 96 tokens and one token.
    let (steps, prompts) = ([0, 1, 2, 3], [0, 96, 97, 2 * 96]);
    let caches = [0, lk, 2 * lk, 3 * lk];
    let table: Vec<u32> = (0..(b * lk / size) as u32).rev().collect();
    let lens = [lk, 1500, lk - 1];
    let mask = View::compact(&mask, &[lk]).unwrap();
    let plain = Attention::new().causal();
    let terms = plain.slopes(&slopes).sinks(&sinks).softcap(5.0).mask(mask).kv_lens(&lens);

    let cache = |x| View::bhld(x, [b, hk, lk, d]).unwrap();
    let packed = |x| View::blhd(x, [1, b * lk, hk, d]).unwrap().packed(&caches).unwrap();
    let paged = |x| View::bhld(x, [b * lk / size, hk, size, d]).unwrap().paged(&table, &lens).unwrap();
    let mut call = |attention: &Attention<'_>, way: &str, tokens: usize| {
        let starts = if tokens == 1 { &steps } else { &prompts };
        let total = if way == "packed" { starts[b] } else { b * tokens };
        let (out, lse) = (&mut out[..total * hq * d], &mut lse[..total * hq]);
        let q = &q[..total * hq * d];
        let flat = [b, hq, tokens, d];
        let (q, out) = match way {
            "packed" => (
                View::blhd(q, [1, total, hq, d]).unwrap().packed(starts).unwrap(),
                ViewMut::blhd(out, [1, total, hq, d]).unwrap().packed(starts).unwrap(),
            ),
            _ => (View::bhld(q, flat).unwrap(), ViewMut::bhld(out, flat).unwrap()),
        };
        let (k, v) = match way {
            "plain" => (cache(&k), cache(&v)),
            "packed" => (packed(&k), packed(&v)),
            _ => (paged(&k), paged(&v)),
        };
        attention.run_with_lse(q, k, v, out, lse).unwrap();
    };

    assert!(count(|| call(&plain.sequential(), "plain", 1)) > 0, "scratch is counted");
    // They live to the end: what a thread frees when it ends would be counted.
    let pools = [1, 2].map(|threads| ThreadPoolBuilder::new().num_threads(threads).build().unwrap());
    // All threads have started, and taken what a thread of a pool needs, before anything is counted.
    for pool in &pools {
        pool.broadcast(|_| ());
    }
    for pool in &pools {
        for way in ["plain", "packed", "paged"] {
            let call = Mutex::new(&mut call);
            pool.install(|| {
                in_a_workspace(pool.current_num_threads(), [plain, terms], |attention, tokens| {
                    (call.lock().unwrap())(attention, way, tokens);
                })
            });
        }
    }
    for pool in &pools {
        let threads = pool.current_num_threads();
        for way in ["plain", "packed", "paged"] {
            for tokens in [1, lq] {
                for attention in [plain, terms] {
                    // Twice on each thread by itself: which tasks a thread gets is up to chance.
                    let call = Mutex::new(&mut call);
                    pool.broadcast(|_| {
                        let call = &mut *call.lock().unwrap();
                        (0..2).for_each(|_| call(&attention.sequential(), way, tokens));
                    });
                    pool.install(|| {
                        let call = &mut *call.lock().unwrap();
                        (0..2).for_each(|_| call(&attention, way, tokens));
                        let third = count(|| call(&attention, way, tokens));
                        assert_eq!(third, 0, "{threads} threads, {way}, {tokens} tokens, {attention:?}");
                    });
                }
            }
        }
        layers(pool, threads);
    }
}

/// The second call in a workspace allocates nothing, whichever threads get which tasks; and when the
/// workspace is dropped, all that it took is free.
fn in_a_workspace(threads: usize, kinds: [Attention<'_>; 2], call: impl Fn(&Attention<'_>, usize)) {
    for (attention, tokens) in kinds.into_iter().flat_map(|kind| [(kind, 1), (kind, 96)]) {
        for attention in [attention.sequential(), attention] {
            let (what, before) =
                (format!("{threads} threads, {tokens} tokens, {attention:?}"), BYTES.load(Ordering::Relaxed));
            let workspace = Workspace::new();
            let lent = attention.workspace(&workspace);
            call(&lent, tokens);
            let (held, taken) = (workspace.bytes(), BYTES.load(Ordering::Relaxed) - before);
            for _ in 0..5 {
                assert_eq!(count(|| call(&lent, tokens)), 0, "{what}");
            }
            assert_eq!(workspace.bytes(), held, "{what}");
            assert!(held > 0 && held as isize <= taken && taken <= held as isize + 4096, "{what}: {taken}");
            drop(workspace);
            assert_eq!(BYTES.load(Ordering::Relaxed), before, "{what}");
        }
    }
}

/// A block with all its parts, on ragged batches and on a cache, near and far.
fn layers(pool: &ThreadPool, threads: usize) {
    let (d, heads, wave) = (96, 4, |n: usize| (0..n).map(|i| (i as f32 * 0.1).sin()).collect::<Vec<f32>>());
    let linear = |n: usize| Linear::new(&wave(d * n), WeightLayout::OutIn, [d, n], Some(&wave(n))).unwrap();
    let config = MultiHeadConfig { kv_heads: 2, ..MultiHeadConfig::new(d, heads) };
    let norm = |n: usize| Norm::rms(&wave(n), 1e-6).unwrap();
    let layer = MultiHead::new(config, linear(d), linear(d / 2), linear(d / 2), linear(d)).unwrap();
    let layer = layer.with_norms(Some(norm(24)), Some(norm(24))).unwrap();
    let layer = layer.with_rotary(Rotary::new(16, Pairing::Halves, 1e4).unwrap()).unwrap();
    let (prompts, steps) = ([0, 50, 51, 200], [0, 1, 2, 3]);
    let positions: Vec<usize> = (0..200).map(|i| i * 100).collect();
    let x = wave(200 * d);
    let mut out = wave(200 * d);
    for order in [NormOrder::Pre, NormOrder::Post] {
        let block = AttentionBlock::new(layer.clone(), norm(d), order).unwrap();
        let shape = CacheShape { batch: 3, heads: 2, capacity: 4096, d: 24, dv: 24 };
        let (mut cache, mut workspace) = (KvCache::<f32>::new(shape).unwrap(), Workspace::new());
        for starts in [&prompts, &steps] {
            let rows = starts[3];
            let tokens = Tokens::ragged(&x[..rows * d], starts).unwrap();
            let placed = tokens.positions(&positions[..rows]);
            let mut call = |attention: &Attention<'_>| {
                let out = &mut out[..rows * d];
                block.forward(placed, attention, &mut workspace, out).unwrap();
                block.forward_cached(tokens, &mut cache, attention, &mut workspace, out).unwrap();
            };
            let attention = Attention::new().causal();
            pool.install(|| {
                call(&attention);
                let second = count(|| call(&attention));
                assert_eq!(second, 0, "{threads} threads, {rows} rows, {order:?}");
            });
        }
    }
}
