//! What a planted fault is made of: a call of an operation with other operands, or with its results edited.

use m3_kernels::cpu::fault::Call;
use m3_kernels::cpu::{CpuBackend, CpuStream};
use m3_kernels::tensor::as_bytes;
use m3_kernels::{Backend, Result};
use m3_spec::dtype::DType;

/// Memory of the subject.
pub type Tensor = m3_kernels::Tensor<CpuBackend>;

/// What stands in for every operation of a case.
pub type Plant = m3_kernels::cpu::fault::Fault;

/// The only stream there is.
pub const STREAM: CpuStream = CpuStream;

/// A fault in one operation: `plant!(RmsNorm, |b, args| …)`. Every other call goes through.
macro_rules! plant {
    ($variant:ident, |$b:ident, $args:ident| $body:expr) => {
        std::sync::Arc::new(
            |$b: &m3_kernels::cpu::CpuBackend, call: m3_kernels::cpu::fault::Call<'_>| match call {
                m3_kernels::cpu::fault::Call::$variant($args) => $body,
                other => other.run($b),
            },
        ) as $crate::mutants::plant::Plant
    };
}

/// The operation called with some operands exchanged: `exchange!(RmsNorm { weight: |b, args| … })`, where each operand
/// is a tensor; `value` fields are given by [`settings!`].
macro_rules! exchange {
    ($variant:ident { $($field:ident: |$b:ident, $args:ident| $made:expr),+ $(,)? }) => {
        std::sync::Arc::new(
            |b: &m3_kernels::cpu::CpuBackend, call: m3_kernels::cpu::fault::Call<'_>| match call {
                m3_kernels::cpu::fault::Call::$variant(args) => {
                    $(let $field = { let ($b, $args) = (b, args); $made? };)+
                    let changed = m3_kernels::ops::$variant { $($field: &$field,)+ ..*args };
                    m3_kernels::cpu::fault::Call::$variant(&changed).run(b)
                }
                other => other.run(b),
            },
        ) as $crate::mutants::plant::Plant
    };
}

/// The operation called with other plain fields: `settings!(RmsNorm { eps: |args| 10.0 * args.eps })`.
macro_rules! settings {
    ($variant:ident { $($field:ident: |$args:ident| $made:expr),+ $(,)? }) => {
        std::sync::Arc::new(
            |b: &m3_kernels::cpu::CpuBackend, call: m3_kernels::cpu::fault::Call<'_>| match call {
                m3_kernels::cpu::fault::Call::$variant(args) => {
                    let changed = m3_kernels::ops::$variant {
                        $($field: { let $args = args; $made },)+
                        ..*args
                    };
                    m3_kernels::cpu::fault::Call::$variant(&changed).run(b)
                }
                other => other.run(b),
            },
        ) as $crate::mutants::plant::Plant
    };
}

/// The operation as it is, then one result edited element by element: `after!(MsaScore.scores, |args| |i, x| …)`.
macro_rules! after {
    ($variant:ident.$field:ident, |$args:ident| $edit:expr) => {
        std::sync::Arc::new(
            |b: &m3_kernels::cpu::CpuBackend, call: m3_kernels::cpu::fault::Call<'_>| match call {
                m3_kernels::cpu::fault::Call::$variant($args) => {
                    call.run(b)?;
                    $crate::mutants::plant::edit(b, $args.$field, $edit)
                }
                other => other.run(b),
            },
        ) as $crate::mutants::plant::Plant
    };
}

pub(super) use {after, exchange, plant, settings};

/// Two faults that go together.
pub fn both(first: Plant, second: Plant) -> Plant {
    std::sync::Arc::new(move |b: &CpuBackend, call: Call<'_>| {
        let second = second.clone();
        first(
            &b.with_fault(std::sync::Arc::new(move |b, call| second(b, call))),
            call,
        )
    })
}

/// Values of a tensor, row-major, widened.
pub fn values(b: &CpuBackend, tensor: &Tensor) -> Result<Vec<f64>> {
    let wide = |values: Vec<f32>| values.into_iter().map(f64::from).collect();
    Ok(match tensor.dtype() {
        DType::BF16 => {
            let values: Vec<half::bf16> = tensor.to_vec(b, &STREAM)?;
            values.into_iter().map(f64::from).collect()
        }
        DType::I32 => {
            let values: Vec<i32> = tensor.to_vec(b, &STREAM)?;
            values.into_iter().map(f64::from).collect()
        }
        _ => wide(tensor.to_vec(b, &STREAM)?),
    })
}

/// Integers of a tensor.
pub fn ints(b: &CpuBackend, tensor: &Tensor) -> Result<Vec<i32>> {
    tensor.to_vec(b, &STREAM)
}

/// Puts values into a tensor, each rounded to its dtype.
pub fn store(b: &CpuBackend, tensor: &Tensor, values: &[f64]) -> Result<()> {
    match tensor.dtype() {
        DType::BF16 => {
            let values: Vec<_> = values.iter().map(|&x| half::bf16::from_f64(x)).collect();
            b.upload(&STREAM, tensor, as_bytes(&values))
        }
        DType::I32 => {
            let values: Vec<_> = values.iter().map(|&x| x as i32).collect();
            b.upload(&STREAM, tensor, as_bytes(&values))
        }
        _ => {
            let values: Vec<_> = values.iter().map(|&x| x as f32).collect();
            b.upload(&STREAM, tensor, as_bytes(&values))
        }
    }
}

/// Memory like that of a tensor, of a dtype, with these values.
pub fn made(b: &CpuBackend, like: &Tensor, dtype: DType, values: &[f64]) -> Result<Tensor> {
    let tensor = Tensor::zeros(b, dtype, like.shape())?;
    store(b, &tensor, values)?;
    Ok(tensor)
}

/// Memory of the same kind for a result that is not kept.
pub fn scratch(b: &CpuBackend, like: &Tensor) -> Result<Tensor> {
    Tensor::zeros(b, like.dtype(), like.shape())
}

/// A copy with every element changed.
pub fn edited(
    b: &CpuBackend,
    tensor: &Tensor,
    change: impl FnMut(usize, f64) -> f64,
) -> Result<Tensor> {
    made(b, tensor, tensor.dtype(), &mapped(b, tensor, change)?)
}

/// Every element changed where it lies.
pub fn edit(b: &CpuBackend, tensor: &Tensor, change: impl FnMut(usize, f64) -> f64) -> Result<()> {
    store(b, tensor, &mapped(b, tensor, change)?)
}

fn mapped(
    b: &CpuBackend,
    tensor: &Tensor,
    mut change: impl FnMut(usize, f64) -> f64,
) -> Result<Vec<f64>> {
    let values = values(b, tensor)?;
    Ok(values
        .iter()
        .enumerate()
        .map(|(i, &x)| change(i, x))
        .collect())
}

/// A copy whose element `i` is the old element `from(i)`.
pub fn moved(b: &CpuBackend, tensor: &Tensor, from: impl Fn(usize) -> usize) -> Result<Tensor> {
    let old = values(b, tensor)?;
    edited(b, tensor, |i, _| old[from(i)])
}

/// The elements where they lie, element `i` being the old element `from(i)`.
pub fn reorder(b: &CpuBackend, tensor: &Tensor, from: impl Fn(usize) -> usize) -> Result<()> {
    let old = values(b, tensor)?;
    edit(b, tensor, |i, _| old[from(i)])
}

/// Index of the element `rows` rows of `width` further down, the first ones coming after the last.
pub fn rolled(tensor: &Tensor, width: usize, rows: usize) -> impl Fn(usize) -> usize + use<> {
    let elements = tensor.elements();
    move |i| (i + rows * width) % elements
}

/// Rounded to bf16.
pub fn bf16(x: f64) -> f64 {
    m3_spec::round::to_bf16(x)
}

/// Logistic function.
pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
