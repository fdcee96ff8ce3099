//! Lending out memory that was itself lent, and getting it back: a client hands a caller's buffer to an engine, then
//! needs it again to verify what arrived, or to read into it from another replica.
#![allow(unsafe_code)]

use std::sync::Arc;

use crate::local::{LocalMut, Owner};

/// A [`LocalMut`] that was lent on. It can be had back once everything made from the loan was dropped.
#[derive(Debug)]
pub struct Loan {
    memory: Arc<LocalMut>,
}

impl Loan {
    /// Lends all bytes of `memory`.
    pub fn new(memory: LocalMut) -> (Loan, LocalMut) {
        let memory = Arc::new(memory);
        // SAFETY: the Arc keeps `memory`, hence its own owner, alive while the part lives. Nobody else reaches the
        // bytes meanwhile: `Loan` gives no access, and `take` gives `memory` back only when it is the last holder.
        let part = unsafe { LocalMut::from_raw(memory.as_ptr(), memory.len(), Owner::shared(memory.clone())) };
        (Loan { memory }, part)
    }

    /// The memory again, when the loan and every part of it was dropped; else the loan.
    pub fn take(self) -> Result<LocalMut, Loan> {
        Arc::try_unwrap(self.memory).map_err(|memory| Loan { memory })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::Buffer;

    #[test]
    fn a_loan_comes_back_only_after_its_parts() {
        let (buffer, memory) = Buffer::zeroed(8);
        let (loan, part) = Loan::new(memory);
        let (mut front, back) = part.split_at(3);
        front.as_mut_slice().fill(7);
        let loan = loan.take().unwrap_err();
        drop(front);
        let loan = loan.take().unwrap_err();
        drop(back);
        assert_eq!(loan.take().unwrap().as_slice(), [7, 7, 7, 0, 0, 0, 0, 0]);
        assert_eq!(buffer.take().unwrap().len(), 8);
    }
}
