//! The task that learns: repeat the one payload token of the prompt.
//!
//! Prompt: BOS x SEP with x uniform over the payload tokens. Reward: share of the response's tokens that equal x. It
//! needs attention, because the response must depend on the prompt, and it grades, so that a group's rewards differ.

use m3_rollout::Prompt;
use m3_spec::philox::{Philox, Stream};

/// Begins a prompt.
const BOS: i64 = 0;
/// Ends a prompt.
const SEP: i64 = 1;
/// First payload token.
const PAYLOAD: i64 = 2;

/// Tokens of a prompt.
pub const PROMPT_TOKENS: usize = 3;

/// Least vocabulary: the two marks and two payload tokens, so that there is something to learn.
pub const VOCAB_MIN: usize = 4;

/// Prompts of a run.
#[derive(Clone, Copy, Debug)]
pub struct Echo {
    draws: Philox,
    vocab: u32,
}

impl Echo {
    /// Prompts of the run `seed` over a vocabulary.
    pub fn new(seed: u64, vocab: usize) -> Self {
        Echo {
            draws: Philox::new(seed, Stream::Data),
            vocab: vocab as u32,
        }
    }

    /// The payload token of a prompt.
    pub fn payload(&self, number: u32) -> i64 {
        let word = self.draws.block([number, 0, 0, 0])[0];
        let range = u64::from(self.vocab) - PAYLOAD as u64;
        // The high half of the product is uniform to 2^-32.
        PAYLOAD + ((u64::from(word) * range) >> 32) as i64
    }

    /// Every sample of a prompt starts from the same tokens.
    pub fn prompt(&self, number: u32, sample: u32) -> Prompt {
        Prompt {
            tokens: vec![BOS, self.payload(number), SEP],
            number,
            sample,
        }
    }

    /// Reward of a response.
    pub fn reward(&self, number: u32, response: &[i64]) -> f32 {
        let payload = self.payload(number);
        let hits = response.iter().filter(|&&token| token == payload).count();
        hits as f32 / response.len().max(1) as f32
    }

    /// Mean reward of the best policy that does not look at its prompt: it always answers the commonest payload.
    pub fn best_blind_reward(&self, prompts: u32) -> f64 {
        let mut counts = vec![0u32; self.vocab as usize];
        for number in 0..prompts {
            counts[self.payload(number) as usize] += 1;
        }
        f64::from(counts.into_iter().max().unwrap_or(0)) / f64::from(prompts.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_are_spread_over_all_tokens_but_the_marks() {
        let echo = Echo::new(7, 16);
        let mut seen = [false; 16];
        for number in 0..960 {
            seen[echo.payload(number) as usize] = true;
        }
        assert_eq!(seen.iter().filter(|&&seen| seen).count(), 14);
        assert!(!seen[0] && !seen[1]);
        assert!(echo.best_blind_reward(960) < 0.2);
    }

    #[test]
    fn a_reward_is_the_share_of_repeats() {
        let echo = Echo::new(7, 16);
        let x = echo.payload(3);
        assert_eq!(echo.reward(3, &[x, x, 0, 1]), 0.5);
        assert_eq!(echo.reward(3, &[]), 0.0);
        assert_eq!(echo.prompt(3, 5).tokens, [0, x, 1]);
    }
}
