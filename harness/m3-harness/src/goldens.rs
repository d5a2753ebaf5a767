//! Goldens as cases: what transformers recorded on a checkpoint beside what this model computes on it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use m3_kernels::Backend;
use m3_spec::dtype::DType;
use safetensors::{Dtype, SafeTensors};

use crate::error::{Error, Result};
use crate::lab::Outcome;
use crate::logprobs::{self, Report, Request, Side};

/// Which run is held against the recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Trainer in fp32, with gradients.
    F32,
    /// The same with the recorded ids forced.
    Replayed,
    /// Rollout engine in fp32: so many tokens at once, the rest one at a time.
    Rollout {
        /// Tokens of the first pass.
        prefill: usize,
    },
    /// Trainer in bf16 with the recorded fp32 ids forced.
    Bf16,
}

/// A checkpoint and the recording that belongs to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Golden {
    /// Directory of the checkpoint.
    pub checkpoint: PathBuf,
    /// Recording, without its extension.
    recording: PathBuf,
}

/// Tensors of a safetensors file, widened.
pub type Tensors = BTreeMap<String, (Vec<usize>, DType, Vec<f64>)>;

impl Golden {
    /// Every committed checkpoint; several may share a recording.
    ///
    /// # Errors
    /// [`Error::Input`] when the directory cannot be read.
    pub fn all(root: &Path) -> Result<Vec<Golden>> {
        let dir = root.join("checkpoints");
        let entries = std::fs::read_dir(&dir).map_err(|error| Error::file(&dir, error))?;
        let mut goldens = Vec::new();
        for entry in entries {
            let checkpoint = entry.map_err(|error| Error::file(&dir, error))?.path();
            let name = checkpoint
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            // `basic-sharded` holds the weights of `basic` in another form.
            let recorded = name.split('-').next().unwrap_or_default();
            let recording = root.join("transformers").join(recorded);
            goldens.push(Golden {
                checkpoint,
                recording,
            });
        }
        goldens.sort_by(|a, b| a.checkpoint.cmp(&b.checkpoint));
        Ok(goldens)
    }

    /// Name of the checkpoint.
    pub fn name(&self) -> String {
        self.checkpoint
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    }

    /// What transformers recorded.
    ///
    /// # Errors
    /// [`Error::Input`] when the file cannot be read.
    pub fn recorded(&self) -> Result<Tensors> {
        read(&self.recording.with_extension("safetensors"))
    }

    /// Token ids of the recording.
    pub fn tokens(&self) -> PathBuf {
        self.recording.with_extension("tokens.json")
    }

    /// What a mode asks of the model, without a dump.
    fn request(&self, mode: Mode) -> Result<Request> {
        let forced = matches!(mode, Mode::Replayed | Mode::Bf16) && self.selects()?;
        Ok(Request {
            side: match mode {
                Mode::Rollout { prefill } => Side::Rollout {
                    prefill: Some(prefill),
                },
                _ => Side::Trainer,
            },
            model: self.checkpoint.clone(),
            tokens: self.tokens(),
            dtype: if mode == Mode::Bf16 {
                DType::BF16
            } else {
                DType::F32
            },
            temperature: 1.0,
            backward: matches!(mode, Mode::F32 | Mode::Replayed),
            recompute: false,
            dump: None,
            replay: forced.then(|| self.recording.with_extension("safetensors")),
            json: None,
        })
    }

    /// Runs the model on the checkpoint and its tokens; the trainer's dump comes with the report.
    ///
    /// # Errors
    /// As [`logprobs::run`].
    pub fn run<B: Backend>(&self, backend: &B, mode: Mode) -> Result<(Report, Tensors)> {
        let request = self.request(mode)?;
        if request.side != Side::Trainer {
            return Ok((logprobs::run(backend, &request)?, Tensors::new()));
        }
        let scratch = tempfile::tempdir().map_err(|error| Error::file(&self.checkpoint, error))?;
        let dump = scratch.path().join("dump.safetensors");
        let report = logprobs::run(
            backend,
            &Request {
                dump: Some(dump.clone()),
                ..request
            },
        )?;
        Ok((report, read(&dump)?))
    }

    /// Log-probs in bf16, with the model's own selections.
    ///
    /// # Errors
    /// As [`logprobs::run`].
    pub fn bf16_log_probs<B: Backend>(&self, backend: &B) -> Result<Vec<f64>> {
        let request = Request {
            replay: None,
            dump: None,
            ..self.request(Mode::Bf16)?
        };
        Ok(flat(&logprobs::run(backend, &request)?))
    }

    /// The recording beside a run, tensor by tensor.
    ///
    /// # Errors
    /// As [`Golden::run`]; [`Error::Input`] when the run lacks a recorded tensor.
    pub fn outcomes<B: Backend>(&self, backend: &B, mode: Mode) -> Result<Vec<Outcome>> {
        let recorded = self.recorded()?;
        let (report, ours) = self.run(backend, mode)?;
        let log_probs = flat(&report);
        let mut outcomes = vec![outcome(
            "logprobs",
            &recorded["logprobs"],
            log_probs.clone(),
        )];
        if mode == Mode::Bf16 {
            let errors = recorded["logprobs"]
                .2
                .iter()
                .zip(&log_probs)
                .map(|(a, b)| (a - b).abs());
            let mean = crate::train::metrics::mean(errors);
            outcomes.push(outcome(
                "logprobs.mean_abs",
                &(vec![1], DType::F32, vec![0.0]),
                vec![mean],
            ));
        }
        if matches!(mode, Mode::F32 | Mode::Replayed) {
            self.compare_dump(&recorded, &ours, &mut outcomes)?;
            let total = report
                .gradients
                .as_ref()
                .map_or(f64::NAN, |g| g.total_grad_norm);
            let expected = self.total_grad_norm()?;
            outcomes.push(outcome(
                "total_grad_norm",
                &(vec![1], DType::F32, vec![expected]),
                vec![total],
            ));
        }
        Ok(outcomes)
    }

    fn compare_dump(
        &self,
        recorded: &Tensors,
        ours: &Tensors,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<()> {
        let missing =
            |name: &str| Error::file(&self.checkpoint, format_args!("the run has no {name}"));
        for (name, expected) in recorded {
            if let Some(tensor) = name.strip_prefix("grad_sample.") {
                let index = &recorded[&format!("grad_index.{tensor}")].2;
                let name = format!("grad.{tensor}");
                let (_, _, values) = ours.get(&name).ok_or_else(|| missing(&name))?;
                let picked = index.iter().map(|&at| values[at as usize]).collect();
                outcomes.push(outcome(&name, expected, picked));
            } else if compared(name) {
                let (shape, _, values) = ours.get(name).ok_or_else(|| missing(name))?;
                if shape.iter().product::<usize>() != expected.2.len() {
                    return Err(Error::file(
                        &self.checkpoint,
                        format_args!("{name} has shape {shape:?}"),
                    ));
                }
                outcomes.push(outcome(name, expected, values.clone()));
            }
        }
        Ok(())
    }

    fn selects(&self) -> Result<bool> {
        Ok(self
            .recorded()?
            .keys()
            .any(|name| name.starts_with("blocks.") || name.starts_with("experts.")))
    }

    fn total_grad_norm(&self) -> Result<f64> {
        let path = self.recording.with_extension("json");
        let text = std::fs::read_to_string(&path).map_err(|error| Error::file(&path, error))?;
        let json: serde_json::Value =
            serde_json::from_str(&text).map_err(|error| Error::file(&path, error))?;
        json["total_grad_norm"]
            .as_f64()
            .ok_or_else(|| Error::file(&path, "has no total_grad_norm"))
    }
}

/// Log-probs of all sequences, one after another.
fn flat(report: &Report) -> Vec<f64> {
    report
        .sequences
        .iter()
        .flat_map(|s| &s.logprobs)
        .map(|&x| f64::from(x))
        .collect()
}

fn compared(name: &str) -> bool {
    let kinds = ["blocks.", "experts.", "expert_weights.", "grad."];
    name == "logits.last" || kinds.iter().any(|kind| name.starts_with(kind))
}

fn outcome(name: &str, expected: &(Vec<usize>, DType, Vec<f64>), got: Vec<f64>) -> Outcome {
    let (shape, storage, reference) = expected.clone();
    Outcome {
        tensor: name.to_owned(),
        shape,
        storage,
        twin: reference.clone(),
        reference,
        got,
    }
}

/// Reads a safetensors file whole.
fn read(path: &Path) -> Result<Tensors> {
    let bytes = std::fs::read(path).map_err(|error| Error::file(path, error))?;
    let file = SafeTensors::deserialize(&bytes).map_err(|error| Error::file(path, error))?;
    let widen = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        let words = view
            .data()
            .chunks_exact(4)
            .map(|b| [b[0], b[1], b[2], b[3]]);
        let (dtype, values) = match view.dtype() {
            Dtype::F32 => (
                DType::F32,
                words.map(|b| f64::from(f32::from_le_bytes(b))).collect(),
            ),
            Dtype::I32 => (
                DType::I32,
                words.map(|b| f64::from(i32::from_le_bytes(b))).collect(),
            ),
            other => {
                return Err(Error::file(
                    path,
                    format_args!("{name} has dtype {other:?}"),
                ));
            }
        };
        Ok((name, (view.shape().to_vec(), dtype, values)))
    };
    file.tensors().into_iter().map(widen).collect()
}
