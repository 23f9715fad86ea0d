//! Tasks that look at the rows as they compute them: the statistics of heads, rows and keys.
//!
//! What a head's rows sum up to is left in parts, one a task, and joined in order. How long a task is does not
//! depend on the threads, so neither do the sums.

use core::sync::atomic::AtomicUsize;

use super::{Job, RowsMut, Tasks};
use crate::call::length;
use crate::join::WIDEST;
use crate::statistics::{HEAD, HeadSums, Observe, Sink};
use crate::view::count;
use crate::{Call, Element, Error, Scratch, ViewMut};

/// Query rows of a task, as in `prefill.rs`, and tasks of the rows of a head at most: their parts take memory.
const ROWS: usize = 256;
const BLOCKS: usize = 32;

/// What a call is asked to tell beside its output.
#[derive(Debug)]
pub(super) struct Observed<'a> {
    sink: Sink<'a>,
    /// Tasks of the rows of a head, and f32 of the part of each.
    blocks: usize,
    part: usize,
    /// To be summed from the parts.
    heads: &'a mut [HeadSums],
    received: Option<&'a mut [f32]>,
}

impl<'a> Observed<'a> {
    /// Where the statistics of a task go.
    pub fn sink(&self, call: &Call<'_>, b: usize, block: usize) -> Sink<'a> {
        let first = (b * call.q.shape()[1] * self.blocks + block) * self.part;
        Sink { part: self.sink.part.wrapping_add(first), ..self.sink }
    }

    /// Whether tasks have one query head alone.
    pub fn is_apart(&self) -> bool {
        self.sink.received
    }

    /// Joins the parts.
    ///
    /// # Safety
    /// No task may be at work on them.
    pub unsafe fn finish(self, call: &Call<'_>) {
        let lk = call.keys_axis();
        let mut received = self.received;
        for (at, head) in self.heads.iter_mut().enumerate() {
            *head = HeadSums::default();
            let mut received = received.as_mut().map(|received| &mut received[at * lk..][..lk]);
            received.iter_mut().for_each(|received| received.fill(0.0));
            for block in 0..self.blocks {
                let part = self.sink.part.wrapping_add((at * self.blocks + block) * self.part);
                // SAFETY: the parts of all heads lie there, at first as zeros.
                unsafe { head.add(&*part.cast()) };
                if let Some(received) = &mut received {
                    // SAFETY: as above, with a number for each key.
                    let part = unsafe { core::slice::from_raw_parts(part.wrapping_add(HEAD), lk) };
                    received.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
                }
            }
        }
    }
}

impl Call<'_> {
    /// As [`Call::split`], for tasks that also tell what the heads did. Rows are then computed whole, by the
    /// prefill kernel in f32; tasks are of a size of their own, and given out `run` at a time.
    ///
    /// # Errors
    /// As [`Call::split`]; [`Error::Length`] if something to write has another length than it says.
    pub fn split_with_statistics<'o, T: Element>(
        &'o self,
        run: usize,
        out: ViewMut<'o, T>,
        observe: Observe<'o>,
        parts: &'o mut Scratch,
    ) -> Result<Tasks<'o>, Error> {
        let out: RowsMut<'o> = self.rows_of(out, None)?;
        let Observe { heads, rows, special, received } = observe;
        let ([b, hq, lq, _], lk) = (self.q.shape(), self.keys_axis());
        length("heads", heads.len(), b.saturating_mul(hq))?;
        rows.as_ref().map_or(Ok(()), |rows| length("rows", rows.len(), self.rows()))?;
        special.map_or(Ok(()), |special| length("special", special.len(), b.saturating_mul(lk)))?;
        let numbers = b.saturating_mul(hq).saturating_mul(lk);
        received.as_ref().map_or(Ok(()), |received| length("received", received.len(), numbers))?;

        let apart = received.is_some();
        let (mut grid, mut part) = ([0; 4], 0);
        if b > 0 && self.group > 0 && lq > 0 {
            // What is not empty is as large as memory at most.
            let blocks = |b: usize| self.q.len(b).div_ceil(self.observed_tokens(b, apart));
            grid = [b, if apart { hq } else { self.kv_heads() }, (0..b).map(blocks).max().unwrap_or(0), 1];
            part = HEAD + if apart { lk.next_multiple_of(WIDEST) } else { 0 };
        }
        let shape = [b, hq, grid[2], part];
        let all = parts.floats(count(shape).ok_or(Error::TooLarge { argument: "parts", shape })?);
        all.fill(0.0);
        let rows = rows.map(|rows| rows.as_mut_ptr());
        let sink = Sink::new(rows, special, all.as_mut_ptr(), grid[2] * part, apart);
        let observed = Observed { sink, blocks: grid[2], part, heads, received };
        let run = run.min(grid.iter().product::<usize>() / 64).max(1);
        let job = Job::Observe { observed, out };
        Ok(Tasks { call: self, job, grid, tokens: ROWS, run, next: AtomicUsize::new(0) })
    }

    /// Queries of a task of batch entry `b`, where tasks have one query head alone or the whole group.
    pub(super) fn observed_tokens(&self, b: usize, apart: bool) -> usize {
        let tokens = ROWS.div_ceil(if apart { 1 } else { self.group.max(1) });
        self.q.len(b).div_ceil(BLOCKS).max(1).checked_next_multiple_of(tokens).unwrap_or(usize::MAX)
    }
}
