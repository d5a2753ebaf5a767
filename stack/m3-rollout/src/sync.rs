//! Weight sync: the trainer's slices copied into the engine's fused storage, bucket by bucket, digests on both sides.

use std::collections::BTreeMap;

use m3_kernels::tensor::as_bytes;
use m3_kernels::{Backend, Tensor, ops};
use m3_model::Slice;
use m3_spec::dtype::DType;
use m3_spec::philox::{Philox, Stream};

use crate::engine::Engine;
use crate::error::{Error, Result};

/// Rows of a tensor that travel together.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Piece {
    slice: usize,
    start: usize,
    rows: usize,
}

/// Copies weights from a trainer into an engine.
pub struct WeightSync<B: Backend> {
    source: Vec<Slice<B>>,
    target: Vec<Slice<B>>,
    buckets: Vec<Vec<Piece>>,
}

/// What an update did.
#[derive(Clone, Debug, Default)]
pub struct SyncReport {
    /// Version of the weights after the update.
    pub weight_version: u64,
    /// Digest of every tensor, trainer's and engine's.
    pub digests: BTreeMap<String, [[u64; 2]; 2]>,
}

impl SyncReport {
    /// Tensors whose digests differ.
    pub fn different(&self) -> Vec<&str> {
        let pairs = self
            .digests
            .iter()
            .filter(|(_, [trainer, engine])| trainer != engine);
        pairs.map(|(name, _)| name.as_str()).collect()
    }
}

impl<B: Backend> WeightSync<B> {
    /// Pairs the slices of both sides by name and lays them out in buckets of about `bucket_bytes`. A tensor larger than
    /// a bucket is split by rows.
    ///
    /// # Errors
    /// [`Error::Sync`] when one side has a tensor the other lacks, in another shape or dtype, or in the same memory.
    pub fn new(source: Vec<Slice<B>>, target: Vec<Slice<B>>, bucket_bytes: usize) -> Result<Self> {
        let mut by_name: BTreeMap<String, Slice<B>> = target
            .into_iter()
            .map(|slice| (slice.name.clone(), slice))
            .collect();
        let mut target = Vec::with_capacity(source.len());
        for slice in &source {
            let Some(mine) = by_name.remove(&slice.name) else {
                return Err(Error::Sync(format!("the engine has no {}", slice.name)));
            };
            paired(slice, &mine)?;
            target.push(mine);
        }
        if let Some(name) = by_name.keys().next() {
            return Err(Error::Sync(format!(
                "the trainer has no {name}; it would never be written"
            )));
        }
        let buckets = lay_out(&source, bucket_bytes);
        Ok(WeightSync {
            source,
            target,
            buckets,
        })
    }

    /// Number of buckets.
    pub fn buckets(&self) -> usize {
        self.buckets.len()
    }

    /// Fills every engine tensor with a seeded pattern, so that what the first update does not write cannot agree.
    ///
    /// # Errors
    /// What the device reports.
    pub fn fill_pattern(&self, backend: &B, stream: &B::Stream, seed: u64) -> Result<()> {
        let philox = Philox::new(seed, Stream::Fill);
        for (number, slice) in self.target.iter().enumerate() {
            let words = (0..slice.value.elements() as u32)
                .map(|at| philox.block([at / 4, number as u32, 0, 0])[at as usize % 4]);
            // Exponents stay in the middle of the range, so that the pattern is finite in either dtype.
            let values = words.map(|word| f32::from_bits((word & 0x803f_ffff) | 0x3f00_0000));
            if slice.value.dtype() == DType::BF16 {
                let values: Vec<_> = values.map(half::bf16::from_f32).collect();
                backend.upload(stream, &slice.value, as_bytes(&values))?;
            } else {
                let values: Vec<f32> = values.collect();
                backend.upload(stream, &slice.value, as_bytes(&values))?;
            }
        }
        Ok(())
    }

    /// Copies one bucket in place. Buckets may be sent in any order and any number of times.
    ///
    /// # Errors
    /// What the device reports.
    pub fn send(&self, backend: &B, stream: &B::Stream, bucket: usize) -> Result<()> {
        for piece in &self.buckets[bucket] {
            let rows = |tensor: &Tensor<B>| tensor.slice(0, piece.start..piece.start + piece.rows);
            let source = &rows(&self.source[piece.slice].value);
            let target = &rows(&self.target[piece.slice].value);
            backend.copy(stream, &ops::Copy { source, target })?;
        }
        Ok(())
    }

    /// Sends every bucket, raises the engine's version, and takes the digests of both sides.
    ///
    /// # Errors
    /// What the device reports.
    pub fn update(
        &self,
        backend: &B,
        stream: &B::Stream,
        engine: &mut Engine<B>,
    ) -> Result<SyncReport> {
        for bucket in 0..self.buckets.len() {
            self.send(backend, stream, bucket)?;
        }
        engine.weight_version += 1;
        let digests = self.digests(backend, stream)?;
        Ok(SyncReport {
            weight_version: engine.weight_version,
            digests,
        })
    }

    /// Digest of every tensor, trainer's and engine's.
    ///
    /// # Errors
    /// What the device reports.
    pub fn digests(
        &self,
        backend: &B,
        stream: &B::Stream,
    ) -> Result<BTreeMap<String, [[u64; 2]; 2]>> {
        let count = self.source.len();
        let sums = Tensor::zeros(backend, DType::U64, [2 * count, 2])?;
        for (number, slice) in self.source.iter().chain(&self.target).enumerate() {
            let sums = &sums.slice(0, number..number + 1).reshape([2]);
            backend.digest(
                stream,
                &ops::Digest {
                    source: &slice.value,
                    start: 0,
                    sums,
                },
            )?;
        }
        let sums: Vec<u64> = sums.to_vec(backend, stream)?;
        let pair = |number: usize| [sums[2 * number], sums[2 * number + 1]];
        let names = self.source.iter().enumerate();
        Ok(names
            .map(|(at, slice)| (slice.name.clone(), [pair(at), pair(count + at)]))
            .collect())
    }
}

fn paired<B: Backend>(source: &Slice<B>, target: &Slice<B>) -> Result<()> {
    let refused = |what: String| Err(Error::Sync(format!("{}: {what}", source.name)));
    let (from, to) = (&source.value, &target.value);
    if from.shape() != to.shape() || from.dtype() != to.dtype() {
        return refused(format!("trainer has {from:?}, engine {to:?}"));
    }
    if B::buffer_id(from.buffer()) == B::buffer_id(to.buffer()) {
        return refused("trainer and engine share memory; a comparison would say nothing".into());
    }
    Ok(())
}

fn lay_out<B: Backend>(slices: &[Slice<B>], bucket_bytes: usize) -> Vec<Vec<Piece>> {
    let mut buckets: Vec<Vec<Piece>> = Vec::new();
    let mut room = 0;
    for (number, slice) in slices.iter().enumerate() {
        let rows = slice.value.shape()[0];
        let row_bytes = slice.value.elements() / rows.max(1) * slice.value.dtype().size();
        let mut start = 0;
        while start < rows {
            if room < row_bytes || buckets.is_empty() {
                buckets.push(Vec::new());
                room = bucket_bytes.max(row_bytes);
            }
            let fit = (room / row_bytes.max(1)).min(rows - start).max(1);
            if let Some(bucket) = buckets.last_mut() {
                bucket.push(Piece {
                    slice: number,
                    start,
                    rows: fit,
                });
            }
            room = room.saturating_sub(fit * row_bytes);
            start += fit;
        }
    }
    buckets
}
