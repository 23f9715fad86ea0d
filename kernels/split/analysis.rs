//! Tasks that look at the rows: statistics beside the output, and what each key receives.

use core::sync::atomic::AtomicUsize;

use super::{Job, Tasks};
use crate::call::length;
use crate::received;
use crate::statistics::{Observe, Sink};
use crate::view::count;
use crate::{Call, Error};

impl<'a> Tasks<'a> {
    /// The same tasks, which also write the statistics of each row. Rows are then computed whole, by the
    /// prefill kernel in f32.
    ///
    /// # Errors
    /// [`Error::Length`] if something has another length than it says.
    pub fn with_statistics(mut self, observe: Observe<'a>) -> Result<Self, Error> {
        let Observe { rows, special, states } = observe;
        let [b, _, lk, _] = self.call.k.shape();
        length("rows", rows.len(), self.call.rows())?;
        special.map_or(Ok(()), |special| length("special", special.len(), b.saturating_mul(lk)))?;
        states.as_ref().map_or(Ok(()), |states| length("states", states.len(), self.call.rows()))?;
        if let Job::Attend { parts, out } = &mut self.job {
            (*parts, self.grid[3]) = (core::ptr::null_mut(), self.grid[3].min(1));
            let states = states.map(|states| states.as_mut_ptr());
            out.statistics = Some(Sink { rows: rows.as_mut_ptr(), special, states });
        }
        Ok(self)
    }
}

impl Call<'_> {
    /// What each key receives, `sum over i of p(i, j)`, from the softmax states of the rows ([`Observe`]):
    /// `out` is compact `[B, Hq, Lk]`. Each task owns some keys of a query head.
    ///
    /// # Errors
    /// [`Error::Length`] if `states` or `out` has another length, [`Error::TooLarge`] if none can have that.
    pub fn split_received<'o>(
        &'o self,
        states: &'o [[f32; 2]],
        out: &'o mut [f32],
    ) -> Result<Tasks<'o>, Error> {
        let ([b, hq, ..], lk) = (self.q.shape(), self.keys_axis());
        length("states", states.len(), self.rows())?;
        let shape = [b, hq, lk, 1];
        length("out", out.len(), count(shape).ok_or(Error::TooLarge { argument: "out", shape })?)?;
        let tokens = received::keys(self.features());
        let grid = if out.is_empty() { [0; 4] } else { [b, hq, lk.div_ceil(tokens), 1] };
        let job = Job::Receive { states, out: out.as_mut_ptr() };
        Ok(Tasks { call: self, job, grid, tokens, run: 1, next: AtomicUsize::new(0) })
    }
}
