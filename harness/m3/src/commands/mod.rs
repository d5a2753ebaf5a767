//! The verbs, one file each: `Args` and `run`.

pub mod completions;
pub mod doctor;
pub mod gate;
pub mod generate;
pub mod list;
pub mod logprobs;
pub mod op;
pub mod train;

/// A seed, decimal or hexadecimal.
fn seed(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| "a seed is a whole number from 0 to 2^64 - 1, decimal or 0x…".into())
}

/// A number of worker threads.
fn threads(text: &str) -> Result<usize, String> {
    let most = m3_kernels::cpu::THREADS_MAX;
    let parsed = text
        .parse()
        .ok()
        .filter(|threads| (1..=most).contains(threads));
    parsed.ok_or_else(|| format!("a number of threads is a whole number from 1 to {most}"))
}

#[cfg(test)]
mod tests {
    use super::{seed, threads};

    #[test]
    fn no_threads_are_refused() {
        assert_eq!(threads("2"), Ok(2));
        assert!(threads("1025").is_err());
        assert!(threads("0").is_err() && threads("-1").is_err() && threads("").is_err());
    }

    #[test]
    fn a_seed_is_read_in_both_spellings() {
        assert_eq!(seed("0x5eed"), Ok(0x5eed));
        assert_eq!(seed("18446744073709551615"), Ok(u64::MAX));
        for text in ["", "-1", "0x", "18446744073709551616", "1.0"] {
            assert!(seed(text).is_err(), "{text}");
        }
    }
}
