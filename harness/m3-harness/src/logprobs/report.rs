//! What `m3 logprobs` says: log-probabilities, nll, norms of gradients.

use std::collections::BTreeMap;

use m3_comm::Communicator;
use m3_kernels::{Backend, Tensor, ops};
use m3_model::Model;
use m3_spec::dtype::DType;
use serde::Serialize;

use super::Tokens;
use crate::error::{Error, Result};

/// Scores of every sequence and norms of gradients.
#[derive(Clone, Debug)]
pub struct Report {
    /// In the order of the file.
    pub sequences: Vec<Sequence>,
    /// Whether the file listed sequences.
    pub listed: bool,
    /// Mean over all scored tokens; absent when none is scored.
    pub mean_nll: Option<f64>,
    /// Norms of d(mean nll)/dW.
    pub gradients: Option<Gradients>,
}

/// Scores of one sequence.
#[derive(Clone, Debug, Serialize)]
pub struct Sequence {
    /// Log-probability of every token after the first.
    pub logprobs: Vec<f32>,
    /// Mean of their negatives; absent in a sequence of one token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean_nll: Option<f64>,
}

/// L2 norms of gradients, by released name.
#[derive(Clone, Debug, Serialize)]
pub struct Gradients {
    /// Of every trained tensor.
    pub grad_norms: BTreeMap<String, f64>,
    /// Of all of them together.
    pub total_grad_norm: f64,
}

impl Report {
    /// Splits the pack's log-probabilities into its sequences.
    ///
    /// # Errors
    /// [`Error::NonFinite`].
    pub(super) fn new(tokens: &Tokens, log_probs: &[f32]) -> Result<Self> {
        let mut sequences = Vec::new();
        let (mut start, mut total, mut scored) = (0, 0.0, 0);
        for (number, length) in tokens.lengths().into_iter().enumerate() {
            let logprobs = log_probs[start..start + length - 1].to_vec();
            if let Some(at) = logprobs.iter().position(|value| !value.is_finite()) {
                return Err(Error::NonFinite(format!(
                    "log-prob {at} of sequence {number}"
                )));
            }
            let nll: f64 = logprobs.iter().map(|&value| -f64::from(value)).sum();
            total += nll;
            scored += logprobs.len();
            let mean_nll = mean(nll, logprobs.len());
            sequences.push(Sequence { logprobs, mean_nll });
            start += length;
        }
        let mean_nll = mean(total, scored);
        Ok(Report {
            sequences,
            listed: tokens.listed,
            mean_nll,
            gradients: None,
        })
    }

    /// The report as JSON: one sequence's fields at the top, several under `sequences`.
    ///
    /// # Errors
    /// [`Error::Input`] when serialization fails.
    pub fn json(&self) -> Result<String> {
        #[derive(Serialize)]
        struct Top<'a> {
            #[serde(skip_serializing_if = "Option::is_none")]
            logprobs: Option<&'a [f32]>,
            #[serde(skip_serializing_if = "Option::is_none")]
            mean_nll: Option<f64>,
            #[serde(skip_serializing_if = "Option::is_none")]
            sequences: Option<&'a [Sequence]>,
            #[serde(flatten)]
            gradients: &'a Option<Gradients>,
        }
        let top = Top {
            logprobs: match self.sequences.as_slice() {
                [one] => Some(&one.logprobs),
                _ => None,
            },
            mean_nll: self.mean_nll,
            sequences: self.listed.then_some(&self.sequences),
            gradients: &self.gradients,
        };
        let text = serde_json::to_string(&top);
        text.map_err(|error| Error::Input(format!("the report cannot be written as JSON: {error}")))
    }
}

fn mean(sum: f64, count: usize) -> Option<f64> {
    (count > 0).then(|| sum / count as f64)
}

/// Norms of every trained tensor's gradient, from sums of squares taken on the device.
pub(super) fn gradients<B: Backend, C: Communicator<B>>(
    model: &Model<B, C>,
    backend: &B,
    stream: &B::Stream,
) -> Result<Gradients> {
    let mut slices = model.slices();
    slices.retain(|slice| slice.grad.is_some());
    let sums = Tensor::zeros(backend, DType::F32, [slices.len()])?;
    for (number, grad) in slices
        .iter()
        .filter_map(|slice| slice.grad.as_ref())
        .enumerate()
    {
        let sum = &sums.slice(0, number..number + 1);
        backend.sum_squares(stream, &ops::SumSquares { source: grad, sum })?;
    }
    let squares: Vec<f32> = sums.to_vec(backend, stream)?;
    let mut grad_norms = BTreeMap::new();
    for (slice, &square) in slices.iter().zip(&squares) {
        if !square.is_finite() {
            return Err(Error::NonFinite(format!("the gradient of {}", slice.name)));
        }
        grad_norms.insert(slice.name.clone(), f64::from(square).sqrt());
    }
    let total_grad_norm = squares
        .iter()
        .map(|&square| f64::from(square))
        .sum::<f64>()
        .sqrt();
    Ok(Gradients {
        grad_norms,
        total_grad_norm,
    })
}
