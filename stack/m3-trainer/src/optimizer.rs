//! AdamW over buckets of slices. Masters and moments come out of a state store and are never fields of a parameter, so
//! that a later store can stream them from disk.

use m3_kernels::{Backend, Tensor, ops};
use m3_model::Slice;
use m3_spec::dtype::DType;

use crate::error::{Error, Result};

/// Constants of AdamW.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
    /// β₁.
    pub beta1: f32,
    /// β₂.
    pub beta2: f32,
    /// Added to the root.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Global gradient norm above which gradients shrink.
    pub max_norm: f32,
    /// Elements after which a bucket is closed.
    pub bucket_elements: usize,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        AdamWConfig {
            beta1: 0.9,
            beta2: 0.98,
            eps: 1e-8,
            weight_decay: 0.1,
            max_norm: 1.0,
            bucket_elements: 200_000_000,
        }
    }
}

/// fp32 state of one slice, each of the slice's own shape.
#[derive(Clone)]
pub struct State<B: Backend> {
    /// Master weight.
    pub master: Tensor<B>,
    /// First moment.
    pub exp_avg: Tensor<B>,
    /// Second moment.
    pub exp_avg_sq: Tensor<B>,
}

/// Where masters and moments live between steps.
pub trait StateStore<B: Backend> {
    /// Takes in the state of a bucket before the first step.
    ///
    /// # Errors
    /// What the store's medium reports.
    fn insert(&mut self, bucket: usize, states: Vec<State<B>>) -> Result<()>;

    /// Makes a bucket's state available.
    ///
    /// # Errors
    /// What the store's medium reports.
    fn fetch(&mut self, bucket: usize) -> Result<Vec<State<B>>>;

    /// Takes a bucket's state back after its step.
    ///
    /// # Errors
    /// What the store's medium reports.
    fn put_back(&mut self, bucket: usize, states: Vec<State<B>>) -> Result<()>;
}

/// Everything stays in device memory.
pub struct Resident<B: Backend>(Vec<Vec<State<B>>>);

impl<B: Backend> Default for Resident<B> {
    fn default() -> Self {
        Resident(Vec::new())
    }
}

impl<B: Backend> StateStore<B> for Resident<B> {
    fn insert(&mut self, bucket: usize, states: Vec<State<B>>) -> Result<()> {
        if bucket != self.0.len() {
            return Err(Error::Input(format!(
                "bucket {bucket} was inserted out of order"
            )));
        }
        self.0.push(states);
        Ok(())
    }

    fn fetch(&mut self, bucket: usize) -> Result<Vec<State<B>>> {
        let states = self.0.get_mut(bucket).map(std::mem::take);
        states.ok_or_else(|| Error::Input(format!("there is no bucket {bucket}")))
    }

    fn put_back(&mut self, bucket: usize, states: Vec<State<B>>) -> Result<()> {
        let place = self.0.get_mut(bucket);
        *place.ok_or_else(|| Error::Input(format!("there is no bucket {bucket}")))? = states;
        Ok(())
    }
}

/// A trained tensor: its weights and its gradient.
struct Trained<B: Backend> {
    value: Tensor<B>,
    grad: Tensor<B>,
}

/// AdamW with one global gradient norm.
pub struct Optimizer<B: Backend, S> {
    config: AdamWConfig,
    store: S,
    buckets: Vec<Vec<Trained<B>>>,
    sums: Tensor<B>,
    norm: Tensor<B>,
    coefficient: Tensor<B>,
    finite: Tensor<B>,
}

/// What changes from step to step, in buffers.
pub struct Pace<B: Backend> {
    /// F32 `[1]`.
    pub learning_rate: Tensor<B>,
    /// I32 `[1]`, 1 at the first step.
    pub step: Tensor<B>,
}

impl<B: Backend, S: StateStore<B>> Optimizer<B, S> {
    /// Masters from the slices' present values, moments zero. Slices that are not trained are left alone.
    ///
    /// # Errors
    /// What the store or the device reports.
    pub fn new(
        backend: &B,
        stream: &B::Stream,
        slices: &[Slice<B>],
        config: AdamWConfig,
        mut store: S,
    ) -> Result<Self> {
        let mut buckets: Vec<Vec<Trained<B>>> = Vec::new();
        let mut open = 0;
        for slice in slices.iter().filter(|slice| slice.trained) {
            let Some(grad) = &slice.grad else {
                return Err(Error::Input(format!(
                    "{} has no gradient buffer",
                    slice.name
                )));
            };
            if open == 0 {
                buckets.push(Vec::new());
            }
            if let Some(bucket) = buckets.last_mut() {
                bucket.push(Trained {
                    value: slice.value.clone(),
                    grad: grad.clone(),
                });
            }
            open += slice.value.elements();
            if open >= config.bucket_elements {
                open = 0;
            }
        }
        for (number, bucket) in buckets.iter().enumerate() {
            let states = bucket
                .iter()
                .map(|trained| initial(backend, stream, trained));
            store.insert(number, states.collect::<Result<_>>()?)?;
        }
        let scalar = |dtype| Tensor::zeros(backend, dtype, [1]);
        Ok(Optimizer {
            config,
            store,
            sums: Tensor::zeros(
                backend,
                DType::F32,
                [buckets.iter().map(Vec::len).sum::<usize>()],
            )?,
            buckets,
            norm: scalar(DType::F32)?,
            coefficient: scalar(DType::F32)?,
            finite: scalar(DType::I32)?,
        })
    }

    /// Global gradient norm before clipping, F32 `[1]`, of the last step.
    pub fn norm(&self) -> &Tensor<B> {
        &self.norm
    }

    /// 1 when the last step's norm was finite and the step was taken, I32 `[1]`.
    pub fn finite(&self) -> &Tensor<B> {
        &self.finite
    }

    /// One step over every bucket; skipped as a whole when the gradient norm is not finite.
    ///
    /// # Errors
    /// What the store or the device reports.
    pub fn step(&mut self, backend: &B, stream: &B::Stream, pace: &Pace<B>) -> Result<()> {
        self.clip(backend, stream)?;
        for bucket in 0..self.buckets.len() {
            let states = self.store.fetch(bucket)?;
            for (trained, state) in self.buckets[bucket].iter().zip(&states) {
                self.update(backend, stream, trained, state, pace)?;
            }
            self.store.put_back(bucket, states)?;
        }
        Ok(())
    }

    fn clip(&self, backend: &B, stream: &B::Stream) -> Result<()> {
        for (number, trained) in self.buckets.iter().flatten().enumerate() {
            let sum = &self.sums.slice(0, number..number + 1);
            backend.sum_squares(
                stream,
                &ops::SumSquares {
                    source: &trained.grad,
                    sum,
                },
            )?;
        }
        let args = ops::ClipCoefficient {
            sums: &self.sums,
            norm: &self.norm,
            coefficient: &self.coefficient,
            finite: &self.finite,
            max_norm: self.config.max_norm,
        };
        Ok(backend.clip_coefficient(stream, &args)?)
    }

    fn update(
        &self,
        backend: &B,
        stream: &B::Stream,
        trained: &Trained<B>,
        state: &State<B>,
        pace: &Pace<B>,
    ) -> Result<()> {
        let AdamWConfig {
            beta1,
            beta2,
            eps,
            weight_decay,
            ..
        } = self.config;
        let args = ops::AdamW {
            grad: &trained.grad,
            master: &state.master,
            exp_avg: &state.exp_avg,
            exp_avg_sq: &state.exp_avg_sq,
            param: &trained.value,
            learning_rate: &pace.learning_rate,
            step: &pace.step,
            coefficient: &self.coefficient,
            finite: &self.finite,
            beta1,
            beta2,
            eps,
            weight_decay,
        };
        Ok(backend.adamw(stream, &args)?)
    }
}

fn initial<B: Backend>(backend: &B, stream: &B::Stream, trained: &Trained<B>) -> Result<State<B>> {
    let shape = trained.value.shape();
    let zeros = || Tensor::zeros(backend, DType::F32, shape);
    let state = State {
        master: zeros()?,
        exp_avg: zeros()?,
        exp_avg_sq: zeros()?,
    };
    backend.copy(
        stream,
        &ops::Copy {
            source: &trained.value,
            target: &state.master,
        },
    )?;
    Ok(state)
}
