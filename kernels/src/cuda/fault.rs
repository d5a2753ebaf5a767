//! Indices found in buffers that point nowhere: a kernel notes the first, the host reads it when it waits anyway.

use std::sync::{Mutex, PoisonError};

use crate::error::Error;

/// What a kernel leaves behind; `struct Fault` of `common.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fault {
    /// 0 while nothing was found, else the number of the site plus one.
    site: u64,
    index: i64,
    value: i64,
    lower: i64,
    upper: i64,
}

/// Size of a [`Fault`], in bytes.
pub(super) const FAULT_BYTES: usize = size_of::<Fault>();

impl Fault {
    pub(super) fn from_bytes(bytes: [u8; FAULT_BYTES]) -> Self {
        let word = |i: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[8 * i..8 * i + 8]);
            i64::from_le_bytes(word)
        };
        Fault {
            site: word(0) as u64,
            index: word(1),
            value: word(2),
            lower: word(3),
            upper: word(4),
        }
    }
}

/// Operands that hold indices, numbered as launchers name them.
#[derive(Default)]
pub(super) struct Sites(Mutex<Vec<(&'static str, &'static str)>>);

impl Sites {
    /// Number of the operand `tensor` of `op`.
    pub(super) fn number(&self, op: &'static str, tensor: &'static str) -> u32 {
        let mut sites = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = sites.iter().position(|&site| site == (op, tensor));
        let number = known.unwrap_or_else(|| {
            sites.push((op, tensor));
            sites.len() - 1
        });
        u32::try_from(number).unwrap_or(u32::MAX)
    }

    /// The error a kernel noted, if any.
    pub(super) fn error(&self, fault: Fault) -> Option<Error> {
        let number = usize::try_from(fault.site.checked_sub(1)?).ok()?;
        let sites = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let &(op, tensor) = sites.get(number)?;
        Some(Error::Index {
            op,
            tensor,
            index: usize::try_from(fault.index).unwrap_or(usize::MAX),
            value: fault.value,
            lower: fault.lower,
            upper: fault.upper,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_names_the_operand_it_was_found_in() {
        let sites = Sites::default();
        assert_eq!(sites.number("embedding", "ids"), 0);
        assert_eq!(sites.number("log_prob", "targets"), 1);
        assert_eq!(sites.number("embedding", "ids"), 0);
        let words: [i64; 5] = [2, 7, 99, 0, 50];
        let mut bytes = [0; FAULT_BYTES];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        let error = sites.error(Fault::from_bytes(bytes)).unwrap().to_string();
        assert_eq!(error, "log_prob: targets[7] = 99 is outside 0..50");
        assert!(sites.error(Fault::default()).is_none());
    }
}
