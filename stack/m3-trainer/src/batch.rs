//! Samples of a step and the micro-batches they are packed into.

use m3_spec::config::TextConfig;

use crate::advantage::group_advantages;
use crate::error::{Error, Result};

/// One rollout: a prompt and the response that was sampled to it.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Samples of one prompt share a group.
    pub group: usize,
    /// Prompt and response.
    pub tokens: Vec<i64>,
    /// Tokens of the prompt, at least 1.
    pub prompt_len: usize,
    /// Whether a response token is trained on; one entry a response token.
    pub loss_mask: Vec<bool>,
    /// Log-probability of every response token when it was sampled.
    pub rollout_log_probs: Vec<f32>,
    /// Reward of the response; none when it was not scored.
    pub reward: Option<f32>,
    /// Weights that sampled it.
    pub weight_version: u64,
}

impl Sample {
    /// Tokens of the response.
    pub fn response_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Response tokens that are trained on.
    pub fn active(&self) -> usize {
        self.loss_mask.iter().filter(|&&active| active).count()
    }

    /// Rows of the sample, counted from its first token, whose next token is of the response.
    pub fn response_rows(&self) -> std::ops::Range<usize> {
        self.prompt_len - 1..self.tokens.len() - 1
    }

    fn check(&self, number: usize) -> Result<()> {
        let refused = |what: String| Err(Error::Input(format!("sample {number}: {what}")));
        let (prompt, total) = (self.prompt_len, self.tokens.len());
        if prompt == 0 || prompt > total {
            return refused(format!(
                "a prompt of {prompt} does not fit its {total} tokens"
            ));
        }
        let response = self.response_len();
        let (mask, scored) = (self.loss_mask.len(), self.rollout_log_probs.len());
        if mask != response || scored != response {
            return refused(format!(
                "{response} response tokens need as many mask entries and log-probs, got {mask} and {scored}"
            ));
        }
        Ok(())
    }
}

/// The samples of one step, split into micro-batches, with what the loss needs of every row.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Samples in the order given.
    pub samples: Vec<Sample>,
    /// Advantage of every sample.
    pub advantages: Vec<f32>,
    /// Samples of every micro-batch, by number; ascending.
    pub micro_batches: Vec<Vec<usize>>,
    /// Samples with an active token.
    trained: usize,
}

impl Batch {
    /// Packs samples in their order, as many in a micro-batch as `max_tokens` allows; a longer sample travels alone.
    ///
    /// # Errors
    /// [`Error::Input`] for no sample, or a sample whose parts do not fit each other or the model.
    pub fn new(samples: Vec<Sample>, max_tokens: usize, config: &TextConfig) -> Result<Self> {
        if samples.is_empty() {
            return Err(Error::Input("a step needs a sample".into()));
        }
        let mut micro_batches: Vec<Vec<usize>> = Vec::new();
        let mut room = 0;
        for (number, sample) in samples.iter().enumerate() {
            sample.check(number)?;
            let tokens = sample.tokens.len();
            if tokens > config.max_position_embeddings {
                let limit = config.max_position_embeddings;
                return Err(Error::Input(format!(
                    "sample {number}: {tokens} tokens exceed {limit}"
                )));
            }
            match micro_batches.last_mut() {
                Some(last) if tokens <= room => last.push(number),
                _ => {
                    micro_batches.push(vec![number]);
                    room = max_tokens;
                }
            }
            room = room.saturating_sub(tokens);
        }
        let rewards: Vec<_> = samples.iter().map(|sample| sample.reward).collect();
        let groups: Vec<_> = samples.iter().map(|sample| sample.group).collect();
        let advantages = group_advantages(&rewards, &groups);
        let trained = samples.iter().filter(|sample| sample.active() > 0).count();
        Ok(Batch {
            samples,
            advantages,
            micro_batches,
            trained,
        })
    }

    /// Sequences of a micro-batch.
    pub fn sequences(&self, micro_batch: usize) -> Vec<Vec<i64>> {
        self.members(micro_batch)
            .map(|(_, sample)| sample.tokens.clone())
            .collect()
    }

    /// Advantage of every row of a micro-batch.
    pub fn row_advantages(&self, micro_batch: usize) -> Vec<f32> {
        let rows = |(number, sample): (usize, &Sample)| {
            let advantage = self.advantages[number];
            sample
                .tokens
                .iter()
                .map(move |_| advantage)
                .collect::<Vec<_>>()
        };
        self.members(micro_batch).flat_map(rows).collect()
    }

    /// Weight of every row in the loss: mask / (active tokens of the sample · samples with an active token).
    ///
    /// The loss is the mean over samples of their token means; a fully masked sample is in neither denominator.
    pub fn row_weights(&self, micro_batch: usize) -> Vec<f32> {
        let trained = self.trained.max(1) as f64;
        let rows = |(_, sample): (usize, &Sample)| {
            let share = 1.0 / (sample.active().max(1) as f64 * trained);
            let mut weights = vec![0.0; sample.tokens.len()];
            for (row, &active) in sample.response_rows().zip(&sample.loss_mask) {
                weights[row] = if active { share as f32 } else { 0.0 };
            }
            weights
        };
        self.members(micro_batch).flat_map(rows).collect()
    }

    /// The values of every sample's response rows, out of the values of a micro-batch's rows.
    pub fn responses(&self, micro_batch: usize, rows: &[f32]) -> Vec<(usize, Vec<f32>)> {
        let mut start = 0;
        let mut split = Vec::new();
        for (number, sample) in self.members(micro_batch) {
            let response = sample.response_rows();
            split.push((
                number,
                rows[start + response.start..start + response.end].to_vec(),
            ));
            start += sample.tokens.len();
        }
        split
    }

    fn members(&self, micro_batch: usize) -> impl Iterator<Item = (usize, &Sample)> {
        self.micro_batches[micro_batch]
            .iter()
            .map(|&number| (number, &self.samples[number]))
    }
}

#[cfg(test)]
mod tests {
    use m3_spec::config::Config;

    use super::*;

    fn sample(tokens: usize, prompt_len: usize, mask: &[bool]) -> Sample {
        Sample {
            group: 0,
            tokens: (0..tokens as i64).collect(),
            prompt_len,
            loss_mask: mask.to_vec(),
            rollout_log_probs: vec![-1.0; mask.len()],
            reward: Some(1.0),
            weight_version: 0,
        }
    }

    #[test]
    fn a_fully_masked_sample_is_in_no_denominator() {
        let samples = vec![sample(5, 1, &[true; 4]), sample(4, 1, &[false; 3])];
        let batch = Batch::new(samples, 64, &Config::tiny().text).unwrap();
        let weights = batch.row_weights(0);
        assert_eq!(weights, [0.25, 0.25, 0.25, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0]);
        let masked = Batch::new(vec![sample(4, 1, &[false; 3])], 64, &Config::tiny().text).unwrap();
        assert_eq!(masked.row_weights(0), [0.0; 4]);
    }

    #[test]
    fn rows_predict_the_token_after_them() {
        let sample = sample(5, 2, &[true, false, true]);
        assert_eq!(sample.response_rows(), 1..4);
        let batch = Batch::new(vec![sample], 64, &Config::tiny().text).unwrap();
        assert_eq!(batch.row_weights(0), [0.0, 0.5, 0.0, 0.5, 0.0]);
        let picked = batch.responses(0, &[0.0, 1.0, 2.0, 3.0, 4.0]);
        assert_eq!(picked, [(0, vec![1.0, 2.0, 3.0])]);
    }

    #[test]
    fn packs_hold_what_fits_and_a_long_sample_travels_alone() {
        let samples = [5, 5, 20, 4, 4]
            .map(|tokens| sample(tokens, tokens, &[]))
            .to_vec();
        let batch = Batch::new(samples, 10, &Config::tiny().text).unwrap();
        assert_eq!(batch.micro_batches, [vec![0, 1], vec![2], vec![3, 4]]);
    }

    #[test]
    fn parts_that_do_not_fit_are_refused_by_sample() {
        let refused = Batch::new(vec![sample(5, 1, &[true; 3])], 64, &Config::tiny().text);
        let message = refused.unwrap_err().to_string();
        assert!(
            message.starts_with("sample 0: 4 response tokens need"),
            "{message}"
        );
    }
}
