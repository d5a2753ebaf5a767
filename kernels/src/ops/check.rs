//! Shape, dtype, layout and overlap checks.

use m3_spec::dtype::DType;

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Storage dtypes of activations and weights.
pub(super) const STORAGE: (&[DType], &str) = (&[DType::F32, DType::BF16], "F32 or BF16");
pub(super) const F32: (&[DType], &str) = (&[DType::F32], "F32");
pub(super) const I32: (&[DType], &str) = (&[DType::I32], "I32");
pub(super) const U64: (&[DType], &str) = (&[DType::U64], "U64");

/// The operands of one operation, gathered while they are checked.
pub(super) struct Check<'a, B: Backend> {
    op: &'static str,
    inputs: Vec<(&'static str, &'a Tensor<B>)>,
    outputs: Vec<(&'static str, &'a Tensor<B>)>,
}

impl<'a, B: Backend> Check<'a, B> {
    pub(super) fn new(op: &'static str) -> Self {
        Check {
            op,
            inputs: Vec::new(),
            outputs: Vec::new(),
        }
    }

    /// An operand that is read: its dtype and its shape, where `None` accepts any extent.
    pub(super) fn input(
        &mut self,
        name: &'static str,
        tensor: &'a Tensor<B>,
        dtypes: (&[DType], &'static str),
        shape: &[Option<usize>],
    ) -> Result<()> {
        self.fits(name, tensor, dtypes, shape)?;
        self.inputs.push((name, tensor));
        Ok(())
    }

    /// An operand that is written; it may overlap no other operand.
    pub(super) fn output(
        &mut self,
        name: &'static str,
        tensor: &'a Tensor<B>,
        dtypes: (&[DType], &'static str),
        shape: &[Option<usize>],
    ) -> Result<()> {
        self.fits(name, tensor, dtypes, shape)?;
        self.outputs.push((name, tensor));
        Ok(())
    }

    /// Both operands have the same dtype.
    pub(super) fn same_dtype(
        &self,
        name: &'static str,
        tensor: &Tensor<B>,
        other: &Tensor<B>,
    ) -> Result<()> {
        if tensor.dtype() == other.dtype() {
            return Ok(());
        }
        let expected = match other.dtype() {
            DType::F32 => "F32 like the other operands",
            DType::BF16 => "BF16 like the other operands",
            _ => "of the other operands' dtype",
        };
        Err(Error::DType {
            op: self.op,
            tensor: name,
            expected,
            got: tensor.dtype(),
        })
    }

    /// The last axis lies without gaps, so that a row is a slice.
    pub(super) fn rows(&self, name: &'static str, tensor: &Tensor<B>) -> Result<()> {
        let last = tensor.shape().len() - 1;
        if tensor.shape()[last] <= 1 || tensor.strides()[last] == 1 {
            return Ok(());
        }
        let got = tensor.strides();
        Err(Error::Layout {
            op: self.op,
            tensor: name,
            expected: "dense along its last axis",
            got,
        })
    }

    /// The whole tensor lies row-major without gaps.
    pub(super) fn contiguous(&self, name: &'static str, tensor: &Tensor<B>) -> Result<()> {
        if tensor.is_contiguous() {
            return Ok(());
        }
        let got = tensor.strides();
        Err(Error::Layout {
            op: self.op,
            tensor: name,
            expected: "row-major without gaps",
            got,
        })
    }

    /// A plain argument holds to its condition.
    pub(super) fn argument(&self, holds: bool, what: impl FnOnce() -> String) -> Result<()> {
        if holds {
            Ok(())
        } else {
            Err(Error::Argument {
                op: self.op,
                what: what(),
            })
        }
    }

    /// No output shares an element with another operand.
    pub(super) fn disjoint(&self) -> Result<()> {
        for (index, &(output, written)) in self.outputs.iter().enumerate() {
            let others = self.inputs.iter().chain(&self.outputs[index + 1..]);
            for &(other, tensor) in others {
                if overlap(written, tensor) {
                    return Err(Error::Overlap {
                        op: self.op,
                        output,
                        other,
                    });
                }
            }
        }
        Ok(())
    }

    fn fits(
        &self,
        name: &'static str,
        tensor: &Tensor<B>,
        (dtypes, expected): (&[DType], &'static str),
        shape: &[Option<usize>],
    ) -> Result<()> {
        let (op, got) = (self.op, tensor.shape());
        if !dtypes.contains(&tensor.dtype()) {
            return Err(Error::DType {
                op,
                tensor: name,
                expected,
                got: tensor.dtype(),
            });
        }
        let fits = shape.len() == got.len()
            && shape
                .iter()
                .zip(got.iter())
                .all(|(want, &have)| want.is_none_or(|want| want == have));
        if fits {
            return Ok(());
        }
        let axes: Vec<String> = shape
            .iter()
            .map(|want| want.map_or("any".into(), |want| want.to_string()))
            .collect();
        let expected = format!("[{}]", axes.join(", "));
        Err(Error::Shape {
            op,
            tensor: name,
            expected,
            got,
        })
    }
}

/// Whether two views share a byte. Exact for views of one fused row layout (equal outer strides, dense rows) and for
/// disjoint ranges; otherwise it errs on the side of "overlaps".
fn overlap<B: Backend>(a: &Tensor<B>, b: &Tensor<B>) -> bool {
    if B::buffer_id(a.buffer()) != B::buffer_id(b.buffer())
        || a.elements() == 0
        || b.elements() == 0
    {
        return false;
    }
    let ((a_start, a_end), (b_start, b_end)) = (byte_range(a), byte_range(b));
    if a_end <= b_start || b_end <= a_start {
        return false;
    }
    let (a_row, b_row) = (row_bytes(a), row_bytes(b));
    let (Some((a_step, a_width)), Some((b_step, b_width))) = (a_row, b_row) else {
        return true;
    };
    if a_step != b_step {
        return true;
    }
    // Both repeat with the same period: compare where their rows lie inside one period.
    let distance = (b_start + a_step - a_start % a_step) % a_step;
    distance < a_width || distance + b_width > a_step
}

fn byte_range<B: Backend>(t: &Tensor<B>) -> (usize, usize) {
    let size = t.dtype().size();
    let reach: usize = t
        .shape()
        .iter()
        .zip(t.strides().iter())
        .map(|(&n, &s)| (n - 1) * s)
        .sum();
    (t.offset() * size, (t.offset() + reach + 1) * size)
}

/// Period and width, in bytes, of a view whose outermost axis repeats a compact inner range.
fn row_bytes<B: Backend>(t: &Tensor<B>) -> Option<(usize, usize)> {
    let size = t.dtype().size();
    let (shape, strides) = (t.shape(), t.strides());
    let outermost = (0..shape.len()).max_by_key(|&axis| strides[axis])?;
    let inner: usize = (0..shape.len())
        .filter(|&a| a != outermost)
        .map(|a| (shape[a] - 1) * strides[a])
        .sum();
    let (step, width) = (strides[outermost] * size, (inner + 1) * size);
    (width <= step).then_some((step, width))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::CpuBackend;

    #[test]
    fn slices_of_one_fused_row_are_disjoint_and_equal_ones_overlap() {
        let backend = CpuBackend::default();
        let fused = Tensor::zeros(&backend, DType::F32, [5, 12]).unwrap();
        let (k, v) = (fused.slice(1, 0..4), fused.slice(1, 4..8));
        assert!(!overlap(&k, &v) && !overlap(&v, &k));
        assert!(overlap(&k, &fused.slice(1, 3..6)) && overlap(&fused, &v));
        assert!(!overlap(&k.split_last(2), &v.split_last(2)));
        assert!(!overlap(&fused.slice(0, 0..2), &fused.slice(0, 2..5)));
        let (last, first) = (fused.slice(1, 8..12), fused.slice(1, 0..4).slice(0, 1..5));
        assert!(!overlap(&last, &first) && !overlap(&first, &last));
    }

    #[test]
    fn an_output_over_an_input_is_refused_by_name() {
        let backend = CpuBackend::default();
        let x = Tensor::zeros(&backend, DType::F32, [4]).unwrap();
        let mut check = Check::new("probe");
        check.input("x", &x, F32, &[None]).unwrap();
        check.output("y", &x, F32, &[Some(4)]).unwrap();
        let refused = check.disjoint().unwrap_err();
        assert_eq!(
            refused,
            Error::Overlap {
                op: "probe",
                output: "y",
                other: "x"
            }
        );
    }
}
