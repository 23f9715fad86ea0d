//! Running the tasks of a call.

use core::ops::Range;
use core::sync::atomic::Ordering;

use super::{Job, Kernel, RowsMut, ScoresTask, Task, Tasks, Unit};
use crate::decode::decode;
use crate::join;
use crate::map::Map;
use crate::prefill::Prefill;
use crate::products::Products;
use crate::{Error, Level, Scratch};

impl Tasks<'_> {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.grid.iter().product()
    }

    /// Visible pairs of a task, about: what its time is in proportion to.
    pub fn pairs(&self, number: usize) -> usize {
        let (call, [b, _, block, span]) = (self.call, self.find(number));
        let tokens = cut(0..call.q_len(b), self.tokens_of(b), block);
        let (spans, pairs) = (call.spans(b).1, call.pairs(b, tokens.start, tokens.end));
        match self.grid[3] {
            1 => pairs,
            _ => {
                if span < spans {
                    pairs.div_ceil(spans)
                } else {
                    0
                }
            }
        }
    }

    /// The numbers of tasks that nobody has got yet.
    fn take(&self) -> Option<Range<usize>> {
        let next = |n: usize| (n < self.count()).then(|| self.count().min(n.saturating_add(self.run)));
        let start = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()?;
        Some(start..self.count().min(start.saturating_add(self.run)))
    }

    /// Computes some tasks that nobody has taken yet, with the kernel of `level`; `false` if there were none.
    /// Under causal the long ones come first.
    ///
    /// # Errors
    /// [`Error::LevelUnavailable`] if this processor does not have the level.
    pub fn run_next(&self, level: Level, scratch: &mut Scratch) -> Result<bool, Error> {
        let Some(mut numbers) = self.take() else { return Ok(false) };
        while let Some(number) = numbers.next() {
            self.compute(number, numbers.clone().next(), level, scratch)?;
        }
        Ok(true)
    }

    /// Queries of a block.
    fn tokens_of(&self, b: usize) -> usize {
        match &self.job {
            Job::Observe { observed, .. } => self.call.observed_tokens(b, observed.is_apart()),
            _ => self.tokens,
        }
    }

    /// Batch entry, key/value head (or query head), block of queries and span of keys of a task.
    fn find(&self, number: usize) -> [usize; 4] {
        let [_, hks, blocks, spans] = self.grid;
        let (span, rest) = (number % spans, number / spans);
        [rest / blocks / hks, rest / blocks % hks, blocks - 1 - rest % blocks, span]
    }

    /// From the head of a task: the key/value head, and the query heads that the task has.
    fn heads(&self, head: usize) -> (usize, Range<usize>) {
        match &self.job {
            Job::Observe { observed, .. } if observed.is_apart() => (head / self.call.group, head..head + 1),
            _ => (head, self.call.heads_of(head)),
        }
    }

    fn compute(
        &self,
        number: usize,
        next: Option<usize>,
        level: Level,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        let (call, [b, hk, block, span]) = (self.call, self.find(number));
        let (len, part) = (call.kv_len(b), core::ptr::null_mut());
        match &self.job {
            &Job::Attend { parts, out } => {
                let tokens = cut(0..call.q.len(b), self.tokens, block);
                if tokens.is_empty() {
                    return Ok(());
                }
                let (heads, after) = (call.heads_of(hk), next.and_then(|next| self.unit(next)));
                let task =
                    Task { call, b, hk, heads, tokens, keys: 0..len, ahead: len, after, part, rows: out };
                self.attend(task, span, parts, level, scratch)
            }
            Job::Scores { stage, heads, queries, out } => {
                let (hk, stage, out) = (hk + heads.start / call.group, *stage, *out);
                let tokens = cut(queries.clone(), self.tokens, block);
                let group = call.heads_of(hk);
                let heads = group.start.max(heads.start)..group.end.min(heads.end);
                level.dispatch(Map { task: ScoresTask { call, b, hk, tokens, heads, stage, out }, scratch })
            }
            Job::Observe { observed, out } => {
                let tokens = cut(0..call.q.len(b), self.tokens_of(b), block);
                if tokens.is_empty() {
                    return Ok(());
                }
                let (hk, heads) = self.heads(hk);
                let after = next.and_then(|next| self.unit(next));
                let rows = RowsMut { statistics: Some(observed.sink(call, b, block)), ..*out };
                let task = Task { call, b, hk, heads, tokens, keys: 0..len, ahead: len, after, part, rows };
                level.dispatch(Prefill { task, products: Products::MultiplyAdds, scratch })
            }
        }
    }

    /// Where a task starts, if it has queries.
    fn unit(&self, number: usize) -> Option<Unit> {
        let [b, head, block, _] = self.find(number);
        let ((hk, _), token) = (self.heads(head), block * self.tokens_of(b));
        (token < self.call.q_len(b)).then_some(Unit { b, hk, token })
    }

    /// Computes a task over all of its keys, or, where there are `parts`, over one span into its part.
    fn attend(
        &self,
        mut task: Task<'_>,
        span: usize,
        parts: *mut f32,
        level: Level,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        let Task { call, b, hk, .. } = task;
        let (kernel, (size, spans)) = (call.kernel(level, b)?, call.spans(b));
        if span >= spans || (kernel == Kernel::Decode && task.tokens.start > 0) {
            return Ok(()); // other batch entries have more spans; decoding takes all queries at once
        }
        if kernel == Kernel::Decode {
            task.tokens = 0..call.q.len(b);
        }
        let run = |task: Task<'_>, scratch: &mut Scratch| match kernel {
            Kernel::Prefill => {
                let products = if call.is_bf16() { level.products() } else { Products::MultiplyAdds };
                level.dispatch(Prefill { task, products, scratch })
            }
            Kernel::Decode => decode(task, level, scratch),
        };
        let over = |span: usize, part: *mut f32| {
            let keys = cut(task.keys.clone(), size, span);
            let after = if keys.end == task.keys.end { task.after } else { None };
            Task { keys, after, part, ..task.clone() }
        };
        if spans > 1 && !parts.is_null() {
            let one = over(span, parts.wrapping_add(self.part(b, hk, span)));
            return run(Task { ahead: one.keys.end, ..one }, scratch);
        }
        if spans == 1 && kernel == Kernel::Prefill {
            return run(task, scratch);
        }
        let len = call.part_len();
        let all = scratch.records(2 * len);
        run(over(0, all), scratch)?;
        for span in 1..spans {
            let part = all.wrapping_add(len);
            run(over(span, part), scratch)?;
            // SAFETY: both hold the records of these rows.
            unsafe { join::add(call, b, hk, task.tokens.clone(), all, part) };
        }
        // SAFETY: the records of the rows, which are this task's.
        unsafe { join::write(call, b, hk, task.tokens, all, &task.rows) };
        Ok(())
    }

    /// Where the records of a key/value head over a span lie.
    fn part(&self, b: usize, hk: usize, span: usize) -> usize {
        let [_, hks, _, spans] = self.grid;
        ((b * hks + hk) * spans + span) * self.call.part_len()
    }

    /// Joins what the tasks have left in parts. Rows are complete only after this.
    pub fn finish(self) {
        let ([batch, heads, ..], call) = (self.grid, self.call);
        let (parts, out) = match self.job {
            Job::Attend { parts, out } if !parts.is_null() => (parts, out),
            // SAFETY: the tasks are done, they borrowed `self`.
            Job::Observe { observed, .. } => return unsafe { observed.finish(call) },
            _ => return,
        };
        for b in (0..batch).filter(|&b| call.spans(b).1 > 1) {
            for hk in 0..heads {
                let (tokens, part) = (0..call.q.len(b), |span| parts.wrapping_add(self.part(b, hk, span)));
                // SAFETY: the records of this head, and its rows; the tasks are done, they borrowed `self`.
                unsafe {
                    for span in 1..call.spans(b).1 {
                        join::add(call, b, hk, tokens.clone(), part(0), part(span));
                    }
                    join::write(call, b, hk, tokens, part(0), &out);
                }
            }
        }
    }
}

/// Block `number` of a range cut in blocks.
fn cut(axis: Range<usize>, size: usize, number: usize) -> Range<usize> {
    let start = axis.start.saturating_add(number.saturating_mul(size));
    start..axis.end.min(start.saturating_add(size))
}
