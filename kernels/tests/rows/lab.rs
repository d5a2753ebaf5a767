//! A backend with a storage dtype and a layout, and tensors with seeded values.

use std::ops::Range;

use half::bf16;
use m3_kernels::cpu::{CpuBackend, CpuStream};
use m3_kernels::tensor::{Element, Shape};
use m3_kernels::{Backend, Tensor};
use m3_spec::dtype::DType;
use m3_spec::philox::splitmix64;

pub type T = Tensor<CpuBackend>;

/// How matrices lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Row-major without gaps.
    Dense,
    /// Columns 3.. of rows that are five elements wider, with NaN beside them.
    Fused,
}

/// Where a test runs.
pub struct Lab {
    pub backend: CpuBackend,
    pub stream: CpuStream,
    pub storage: DType,
    pub layout: Layout,
}

impl Lab {
    pub fn new(threads: usize, storage: DType, layout: Layout) -> Lab {
        let backend = CpuBackend::new(threads).unwrap();
        let stream = backend.stream();
        Lab {
            backend,
            stream,
            storage,
            layout,
        }
    }

    /// Two threads, f32, dense.
    pub fn plain() -> Lab {
        Lab::new(2, DType::F32, Layout::Dense)
    }

    /// A matrix in storage dtype with `values`.
    pub fn matrix(&self, values: &[f32], [rows, cols]: [usize; 2]) -> T {
        let target = self.room(self.storage, [rows, cols]);
        let bytes = match self.storage {
            DType::BF16 => {
                let values: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
                m3_kernels::tensor::as_bytes(&values).to_vec()
            }
            _ => m3_kernels::tensor::as_bytes(values).to_vec(),
        };
        self.backend.upload(&self.stream, &target, &bytes).unwrap();
        target
    }

    /// Rows `tokens` of the matrix of `seed`: a row's values depend on its number alone.
    pub fn rows(&self, seed: u64, tokens: &Range<usize>, cols: usize) -> T {
        self.matrix(&host_rows(seed, tokens, cols), [tokens.len(), cols])
    }

    /// A matrix in storage dtype to be written; NaN until then.
    pub fn out(&self, shape: [usize; 2]) -> T {
        self.room(self.storage, shape)
    }

    fn room(&self, dtype: DType, [rows, cols]: [usize; 2]) -> T {
        let (before, wider) = match self.layout {
            Layout::Dense => (0, 0),
            Layout::Fused => (3, 5),
        };
        let whole = Tensor::zeros(&self.backend, dtype, [rows, cols + wider]).unwrap();
        let fill = m3_kernels::ops::Fill {
            target: &whole,
            value: f32::NAN,
        };
        self.backend.fill(&self.stream, &fill).unwrap();
        whole.slice(1, before..before + cols)
    }

    /// A row-major tensor with `values`.
    pub fn put<E: Element>(&self, values: &[E], shape: impl Into<Shape>) -> T {
        Tensor::from_slice(&self.backend, &self.stream, values, shape).unwrap()
    }

    /// A row-major F32 tensor, +0.
    pub fn f32s(&self, shape: impl Into<Shape>) -> T {
        Tensor::zeros(&self.backend, DType::F32, shape).unwrap()
    }

    /// A row-major I32 tensor, 0.
    pub fn i32s(&self, shape: impl Into<Shape>) -> T {
        Tensor::zeros(&self.backend, DType::I32, shape).unwrap()
    }

    /// Values of a tensor of any dtype but U64 and U8, widened.
    pub fn read(&self, tensor: &T) -> Vec<f32> {
        match tensor.dtype() {
            DType::BF16 => {
                let values = tensor.to_vec::<bf16>(&self.backend, &self.stream).unwrap();
                values.into_iter().map(bf16::to_f32).collect()
            }
            DType::I32 => self
                .read_i32(tensor)
                .into_iter()
                .map(|x| x as f32)
                .collect(),
            _ => tensor.to_vec(&self.backend, &self.stream).unwrap(),
        }
    }

    pub fn read_i32(&self, tensor: &T) -> Vec<i32> {
        tensor.to_vec(&self.backend, &self.stream).unwrap()
    }

    pub fn bits(&self, tensor: &T) -> Vec<u32> {
        self.read(tensor).into_iter().map(f32::to_bits).collect()
    }
}

/// Rows `tokens` of the matrix of `seed`, in [-2, 2).
pub fn host_rows(seed: u64, tokens: &Range<usize>, cols: usize) -> Vec<f32> {
    let value = |t: usize, c: usize| {
        let word = splitmix64(seed, (t * 65_536 + c) as u64);
        (word >> 40) as f32 / 4_194_304.0 - 2.0
    };
    let cells = tokens.clone().flat_map(|t| (0..cols).map(move |c| (t, c)));
    cells.map(|(t, c)| value(t, c)).collect()
}

/// `topk` different ids below `count` of a token, ascending.
pub fn ids_of(token: usize, topk: usize, count: usize) -> Vec<i32> {
    let mut ids: Vec<i32> = (0..count as i32).collect();
    ids.sort_by_key(|&id| splitmix64(91, (token * count) as u64 + id as u64));
    ids.truncate(topk);
    ids.sort_unstable();
    ids
}
