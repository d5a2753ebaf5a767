//! Where a case works: seeded inputs on both sides, outputs that start poisoned, and what is to be compared.

use std::collections::BTreeMap;
use std::ops::Range;

use m3_kernels::tensor::as_bytes;
use m3_kernels::{Backend, Result, Shape, Tensor};
use m3_reference::Rounding;
use m3_spec::digest::Digest;
use m3_spec::dtype::DType;
use m3_spec::inputs::{Distribution, Inputs};
use m3_spec::round::to_dtype;

/// Standard deviation of an earlier gradient: small beside the new one, so that its error still shows.
const EARLIER_STD: f64 = 0.25;

/// A bench for one case: device, seed, storage dtype.
pub struct Lab<'a, B: Backend> {
    /// Device under judgement.
    pub backend: &'a B,
    /// Its queue.
    pub stream: B::Stream,
    /// Storage dtype of the case.
    pub storage: DType,
    inputs: Inputs,
    drawn: u64,
    /// What gradients that are added to held before, by the identity of their buffer.
    started: BTreeMap<usize, Vec<f64>>,
    judged: Judged,
}

/// Everything a case puts up for judgement.
#[derive(Default)]
pub struct Judged {
    /// Tensors in stage order.
    pub outcomes: Vec<Outcome>,
    /// Digest of the inputs.
    pub digest: Digest,
    /// Boundaries of the sequences, for the words of a failure.
    pub cu_seqlens: Option<Vec<i32>>,
    /// Keys per block, for the words of a failure.
    pub block_size: Option<usize>,
    /// First row of every expert, for the words of a failure.
    pub expert_offsets: Option<Vec<i32>>,
}

/// An input on both sides: the same numbers.
pub struct Given<B: Backend> {
    /// For the reference.
    pub host: Vec<f64>,
    /// For the subject.
    pub device: Tensor<B>,
}

/// One tensor to be judged.
pub struct Outcome {
    /// Name that gates match.
    pub tensor: String,
    /// Extents.
    pub shape: Vec<usize>,
    /// Storage of the subject's side.
    pub storage: DType,
    /// Exact.
    pub reference: Vec<f64>,
    /// The same mathematics with the pinned rounding points.
    pub twin: Vec<f64>,
    /// What the subject computed.
    pub got: Vec<f64>,
}

impl<'a, B: Backend> Lab<'a, B> {
    /// A bench for the case `case` under `seed`.
    pub fn new(backend: &'a B, storage: DType, seed: u64, case: &str) -> Self {
        Lab {
            backend,
            stream: backend.stream(),
            storage,
            inputs: Inputs::new(seed, case),
            drawn: 0,
            started: BTreeMap::new(),
            judged: Judged::default(),
        }
    }

    /// Mean 0 and standard deviation `std`, in the storage dtype.
    pub fn normal(&mut self, label: &str, std: f64, shape: impl Into<Shape>) -> Result<Given<B>> {
        self.draw(label, Distribution::Normal { std }, self.storage, shape)
    }

    /// Mean 0 and standard deviation `std`, in F32.
    pub fn normal_f32(
        &mut self,
        label: &str,
        std: f64,
        shape: impl Into<Shape>,
    ) -> Result<Given<B>> {
        self.draw(label, Distribution::Normal { std }, DType::F32, shape)
    }

    /// Any distribution and dtype.
    pub fn draw(
        &mut self,
        label: &str,
        distribution: Distribution,
        dtype: DType,
        shape: impl Into<Shape>,
    ) -> Result<Given<B>> {
        let shape = shape.into();
        let values = self
            .inputs
            .f64s(label, distribution, dtype, shape.elements());
        self.given(values, dtype, shape)
    }

    /// `len` integers in `0..bound`.
    pub fn integers(&self, label: &str, bound: u32, len: usize) -> Vec<i32> {
        self.inputs
            .integers(label, bound, len)
            .into_iter()
            .map(|x| x as i32)
            .collect()
    }

    /// Chosen values, rounded once to `dtype`.
    pub fn given(
        &mut self,
        values: Vec<f64>,
        dtype: DType,
        shape: impl Into<Shape>,
    ) -> Result<Given<B>> {
        let host: Vec<f64> = values.iter().map(|&x| to_dtype(x, dtype)).collect();
        let device = Tensor::zeros(self.backend, dtype, shape)?;
        self.put(&device, &host)?;
        Ok(Given { host, device })
    }

    /// Several inputs `[T, widths]` as slices of one fused row, on the device.
    pub fn fuse(&mut self, parts: &[&Given<B>]) -> Result<Vec<Tensor<B>>> {
        let width = |given: &Given<B>| given.device.elements() / given.device.shape()[0];
        let tokens = parts[0].device.shape()[0];
        let total: usize = parts.iter().map(|part| width(part)).sum();
        let fused = self.output(parts[0].device.dtype(), [tokens, total])?;
        let mut start = 0;
        parts
            .iter()
            .map(|part| {
                let range: Range<usize> = start..start + width(part);
                start = range.end;
                let inner = part.device.shape()[part.device.shape().len() - 1];
                let slice = fused.slice(1, range).split_last(inner);
                self.put(&slice, &part.host)?;
                Ok(slice)
            })
            .collect()
    }

    /// Integers on the device.
    pub fn ints(&mut self, values: &[i32], shape: impl Into<Shape>) -> Result<Tensor<B>> {
        self.note(values.iter().map(|&x| x as u32));
        Tensor::from_slice(self.backend, &self.stream, values, shape)
    }

    /// Memory for an output, filled with NaN (integers with a value that is no id), so that what is never written shows.
    pub fn output(&self, dtype: DType, shape: impl Into<Shape>) -> Result<Tensor<B>> {
        let tensor = Tensor::zeros(self.backend, dtype, shape)?;
        let poison = if matches!(dtype, DType::F32 | DType::BF16) {
            0xff
        } else {
            0x7f
        };
        let bytes = vec![poison; tensor.elements() * dtype.size()];
        self.backend.upload(&self.stream, &tensor, &bytes)?;
        Ok(tensor)
    }

    /// Memory for a gradient that is added to. It holds the gradient of an earlier micro-batch, which
    /// [`Lab::judge`] expects in the result.
    pub fn gradient(&mut self, shape: impl Into<Shape>) -> Result<Tensor<B>> {
        let label = format!("earlier gradient {}", self.started.len());
        let earlier = self.normal_f32(&label, EARLIER_STD, shape)?;
        let buffer = B::buffer_id(earlier.device.buffer());
        self.started.insert(buffer, earlier.host);
        Ok(earlier.device)
    }

    /// The exact reference.
    pub fn exact(&self) -> Rounding {
        Rounding::Exact
    }

    /// The twin of the storage dtype.
    pub fn twin(&self) -> Rounding {
        Rounding::Twin {
            storage: self.storage,
        }
    }

    /// Puts a tensor of the subject beside the reference and its twin. Call in stage order.
    pub fn judge(
        &mut self,
        tensor: &str,
        got: &Tensor<B>,
        mut reference: Vec<f64>,
        mut twin: Vec<f64>,
    ) -> Result<()> {
        if let Some(earlier) = self.started.get(&B::buffer_id(got.buffer())) {
            for values in [&mut reference, &mut twin] {
                values
                    .iter_mut()
                    .zip(earlier)
                    .for_each(|(x, before)| *x += before);
            }
        }
        let got_values = self.read(got)?;
        let (shape, storage) = (got.shape().to_vec(), got.dtype());
        let outcome = Outcome {
            tensor: tensor.to_owned(),
            shape,
            storage,
            reference,
            twin,
            got: got_values,
        };
        self.judged.outcomes.push(outcome);
        Ok(())
    }

    /// Puts integers of the subject beside the reference's.
    pub fn judge_ids(&mut self, tensor: &str, got: &Tensor<B>, reference: &[i32]) -> Result<()> {
        let exact: Vec<f64> = reference.iter().map(|&x| f64::from(x)).collect();
        self.judge(tensor, got, exact.clone(), exact)
    }

    /// Lets failures name sequences and key blocks.
    pub fn packed(&mut self, cu_seqlens: &[i32], block_size: usize) {
        self.judged.cu_seqlens = Some(cu_seqlens.to_vec());
        self.judged.block_size = Some(block_size);
    }

    /// Lets failures name experts.
    pub fn routed(&mut self, expert_offsets: &[i32]) {
        self.judged.expert_offsets = Some(expert_offsets.to_vec());
    }

    /// What was put up for judgement.
    pub fn finish(self) -> Judged {
        self.judged
    }

    /// A tensor's values, widened.
    pub fn read(&self, tensor: &Tensor<B>) -> Result<Vec<f64>> {
        let (backend, stream) = (self.backend, &self.stream);
        Ok(match tensor.dtype() {
            DType::BF16 => widen(&tensor.to_vec::<half::bf16>(backend, stream)?),
            DType::I32 => widen(&tensor.to_vec::<i32>(backend, stream)?),
            _ => widen(&tensor.to_vec::<f32>(backend, stream)?),
        })
    }

    fn put(&mut self, tensor: &Tensor<B>, host: &[f64]) -> Result<()> {
        self.note(host.iter().map(|&x| (x as f32).to_bits()));
        if tensor.dtype() == DType::BF16 {
            let values: Vec<half::bf16> = host.iter().map(|&x| half::bf16::from_f64(x)).collect();
            return self.backend.upload(&self.stream, tensor, as_bytes(&values));
        }
        let values: Vec<f32> = host.iter().map(|&x| x as f32).collect();
        self.backend.upload(&self.stream, tensor, as_bytes(&values))
    }

    fn note(&mut self, bits: impl ExactSizeIterator<Item = u32>) {
        for word in bits {
            self.judged.digest.update(word, self.drawn);
            self.drawn += 1;
        }
    }
}

fn widen<T: Copy>(values: &[T]) -> Vec<f64>
where
    f64: From<T>,
{
    values.iter().map(|&x| f64::from(x)).collect()
}

/// cu_seqlens of documents of these lengths.
pub fn cu_seqlens(lengths: &[usize]) -> Vec<i32> {
    let mut ends = vec![0];
    ends.extend(lengths.iter().scan(0, |end, &length| {
        *end += length as i32;
        Some(*end)
    }));
    ends
}

/// Position of every token in its own document.
pub fn positions(lengths: &[usize]) -> Vec<i32> {
    lengths
        .iter()
        .flat_map(|&length| 0..length as i32)
        .collect()
}
