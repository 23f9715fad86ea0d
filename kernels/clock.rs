//! Where the time of a task goes, for `headwise bench --profile`. A clock that is off costs a branch at the end
//! of each part, which are thousands of cycles; one that is on reads the processor's counter there.

use core::cell::Cell;

/// The parts of a task. What is in none of them is what a task takes beside: finding its keys, its loops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Part {
    /// Q Kᵀ, and the largest score of each row.
    Scores,
    /// Cap, slopes, bias, mask and edges.
    Terms,
    /// Exp, sums and the new maximum.
    Softmax,
    /// Weights times V, and rescaling what was summed before; of bf16 also rounding the weights.
    Values,
    /// Queries scaled and transposed, keys and values copied, widened or paired.
    Packing,
    /// Rows divided by their sums and written.
    Writing,
}

impl Part {
    /// In the order of a task's work, but for packing.
    pub const ALL: [Part; 6] =
        [Part::Scores, Part::Terms, Part::Softmax, Part::Values, Part::Packing, Part::Writing];

    /// A word for tables.
    pub fn name(self) -> &'static str {
        match self {
            Part::Scores => "scores",
            Part::Terms => "terms",
            Part::Softmax => "softmax",
            Part::Values => "values",
            Part::Packing => "packing",
            Part::Writing => "writing",
        }
    }
}

/// Sums up the ticks of each part.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    on: bool,
    last: Cell<u64>,
    ticks: [Cell<u64>; Part::ALL.len()],
}

impl Clock {
    pub fn running() -> Self {
        Self { on: true, ..Self::default() }
    }

    pub fn ticks(&self) -> [u64; Part::ALL.len()] {
        self.ticks.each_ref().map(Cell::get)
    }

    /// A part begins: what went before belongs to none.
    #[inline(always)]
    pub fn start(&self) {
        if self.on {
            self.last.set(ticks());
        }
    }

    /// A part ends, which began where the last one ended.
    #[inline(always)]
    pub fn lap(&self, part: Part) {
        if self.on {
            let (now, sum) = (ticks(), &self.ticks[part as usize]);
            sum.set(sum.get() + now.saturating_sub(self.last.replace(now)));
        }
    }
}

/// The processor's counter of time, in a unit of its own.
#[inline(always)]
pub fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has it.
    unsafe {
        core::arch::x86_64::_rdtsc()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        use std::sync::OnceLock;
        use std::time::Instant;
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_nanos() as u64
    }
}
