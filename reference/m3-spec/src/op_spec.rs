//! What an op is, as data: axes, tensors, constants, what the gradient needs, invariants, work.
//!
//! One constant of type [`OpSpec`] stands at the head of every op, in `ops/<op>.rs`.

use crate::axes::{Axis, AxisError, AxisValues};
use crate::dtype::DType;
use crate::rounding::{RoundingPoint, points};

/// What a coordinate along a dim is called in messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Word {
    /// Nothing: channels and other dims that the numbers alone describe.
    Plain,
    /// A token of the pack: sequence and position in it.
    Token,
    /// A token that is a key: its key block too.
    KeyToken,
    /// A head of unspecified kind.
    Head,
    /// A query head.
    QHead,
    /// A key and value head.
    KvHead,
    /// An index head.
    IndexHead,
    /// A key block, counted from the sequence's start.
    Block,
    /// A slot of a selection.
    Slot,
    /// An expert.
    Expert,
    /// A slot of a token's chosen experts.
    ExpertSlot,
    /// A row in expert order.
    Row,
    /// A vocabulary id.
    VocabId,
    /// A boundary of `cu_seqlens`.
    Sequence,
}

/// One dim of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dim {
    /// Extent: an expression over axes, such as `T`, `2*F`, `E+1`.
    pub extent: &'static str,
    /// What a coordinate is called.
    pub word: Word,
}

/// A dim with a word.
pub const fn dim(extent: &'static str, word: Word) -> Dim {
    Dim { extent, word }
}

/// A dim whose coordinates need no word.
pub const fn plain(extent: &'static str) -> Dim {
    Dim {
        extent,
        word: Word::Plain,
    }
}

/// dtype of a tensor of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArgDType {
    /// The run's storage dtype: bf16, or f32 in the second mode.
    Storage,
    /// Always this one.
    Always(DType),
}

/// A tensor that an op takes or gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorArg {
    /// Name, as reference, kernels, gates and goldens use it.
    pub name: &'static str,
    /// Row-major shape.
    pub shape: &'static [Dim],
    /// dtype.
    pub dtype: ArgDType,
    /// What it holds.
    pub meaning: &'static str,
    /// Elements that an execution touches, where that is not all of them: an expression over axes.
    pub touched: Option<&'static str>,
}

impl TensorArg {
    const fn new(
        name: &'static str,
        shape: &'static [Dim],
        dtype: ArgDType,
        meaning: &'static str,
    ) -> Self {
        TensorArg {
            name,
            shape,
            dtype,
            meaning,
            touched: None,
        }
    }

    /// The same tensor, of which only so many elements are touched.
    pub const fn touching(mut self, elements: &'static str) -> Self {
        self.touched = Some(elements);
        self
    }

    /// The shape under axis values.
    pub fn shape(&self, axes: &AxisValues) -> Vec<usize> {
        self.shape
            .iter()
            .map(|dim| axes.eval(dim.extent) as usize)
            .collect()
    }

    /// The dtype under a storage dtype.
    pub fn dtype(&self, storage: DType) -> DType {
        match self.dtype {
            ArgDType::Storage => storage,
            ArgDType::Always(dtype) => dtype,
        }
    }

    /// Bytes that one execution has to move for it.
    pub fn bytes(&self, axes: &AxisValues, storage: DType) -> u64 {
        let elements = match self.touched {
            Some(expression) => axes.eval(expression),
            None => self.shape.iter().map(|dim| axes.eval(dim.extent)).product(),
        };
        elements * self.dtype(storage).size() as u64
    }
}

/// A tensor in the storage dtype.
pub const fn stored(name: &'static str, shape: &'static [Dim], meaning: &'static str) -> TensorArg {
    TensorArg::new(name, shape, ArgDType::Storage, meaning)
}

/// An fp32 tensor.
pub const fn fp32(name: &'static str, shape: &'static [Dim], meaning: &'static str) -> TensorArg {
    TensorArg::new(name, shape, ArgDType::Always(DType::F32), meaning)
}

/// An i32 tensor.
pub const fn int(name: &'static str, shape: &'static [Dim], meaning: &'static str) -> TensorArg {
    TensorArg::new(name, shape, ArgDType::Always(DType::I32), meaning)
}

/// A plain argument that never changes during a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Constant {
    /// Name.
    pub name: &'static str,
    /// What it is, and its value in MiniMax-M3.
    pub meaning: &'static str,
}

/// A plain argument.
pub const fn constant(name: &'static str, meaning: &'static str) -> Constant {
    Constant { name, meaning }
}

/// The gradient of an op.
#[derive(Clone, Copy, Debug)]
pub struct Backward {
    /// Gradients that arrive.
    pub grads_in: &'static [TensorArg],
    /// Inputs and outputs of the forward pass that are kept for it, by name.
    pub saved: &'static [&'static str],
    /// Gradients that leave.
    pub grads: &'static [TensorArg],
    /// Multiplications and additions.
    pub flops: fn(&AxisValues) -> u64,
}

/// The head of an op.
#[derive(Clone, Copy, Debug)]
pub struct OpSpec {
    /// Stem of the op in every room.
    pub name: &'static str,
    /// What it does, in one line.
    pub summary: &'static str,
    /// Extents.
    pub axes: &'static [Axis],
    /// Plain arguments.
    pub constants: &'static [Constant],
    /// Tensors that it reads.
    pub inputs: &'static [TensorArg],
    /// Tensors that it writes; a name that is also an input is updated in place.
    pub outputs: &'static [TensorArg],
    /// Multiplications and additions of the equation; an exponential counts as one, a comparison as none.
    pub flops: fn(&AxisValues) -> u64,
    /// The gradient, if the op has one.
    pub backward: Option<Backward>,
    /// What holds for every input, each a property test.
    pub invariants: &'static [&'static str],
}

impl OpSpec {
    /// Values for this op's axes.
    ///
    /// # Errors
    /// [`AxisError`] for a name that is not an axis, or an axis without a value.
    pub fn axis_values(&self, values: &[(&str, u64)]) -> Result<AxisValues, AxisError> {
        AxisValues::new(self.name, self.axes, values)
    }

    /// The rows of the rounding table that concern this op.
    pub fn rounding(&self) -> impl Iterator<Item = &'static RoundingPoint> {
        points(self.name)
    }

    /// All tensors: inputs, outputs, then gradients that arrive and that leave.
    pub fn tensors(&self) -> impl Iterator<Item = &'static TensorArg> {
        let backward = self
            .backward
            .iter()
            .flat_map(|b| b.grads_in.iter().chain(b.grads));
        self.inputs
            .iter()
            .chain(self.outputs)
            .chain(backward.collect::<Vec<_>>())
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&'static TensorArg> {
        self.tensors().find(|tensor| tensor.name == name)
    }

    /// Bytes that a forward pass cannot avoid moving: every operand once.
    pub fn bytes(&self, axes: &AxisValues, storage: DType) -> u64 {
        self.inputs
            .iter()
            .chain(self.outputs)
            .map(|tensor| tensor.bytes(axes, storage))
            .sum()
    }

    /// The same for the gradient: what arrives, what was saved, what leaves. 0 without a gradient.
    pub fn backward_bytes(&self, axes: &AxisValues, storage: DType) -> u64 {
        let Some(backward) = &self.backward else {
            return 0;
        };
        let saved = backward.saved.iter().filter_map(|name| self.tensor(name));
        let moved = backward.grads_in.iter().chain(backward.grads).chain(saved);
        moved.map(|tensor| tensor.bytes(axes, storage)).sum()
    }

    /// Multiplications and additions of the gradient. 0 without one.
    pub fn backward_flops(&self, axes: &AxisValues) -> u64 {
        self.backward
            .as_ref()
            .map_or(0, |backward| (backward.flops)(axes))
    }
}

/// `T`: tokens of the pack.
pub const TOKEN: Dim = dim("T", Word::Token);
/// `T`, as keys.
pub const KEY_TOKEN: Dim = dim("T", Word::KeyToken);
/// `H`: width of the residual stream.
pub const HIDDEN: Dim = plain("H");
/// `Hq`: query heads.
pub const Q_HEAD: Dim = dim("Hq", Word::QHead);
/// `Hkv`: key and value heads.
pub const KV_HEAD: Dim = dim("Hkv", Word::KvHead);
/// `Hi`: index heads.
pub const INDEX_HEAD: Dim = dim("Hi", Word::IndexHead);
/// `D`: dims of a head.
pub const HEAD_DIM: Dim = plain("D");
/// `B+1`: boundaries of the sequences.
pub const BOUNDARIES: Dim = dim("B+1", Word::Sequence);
/// `topk`: slots of a block selection.
pub const SLOT: Dim = dim("topk", Word::Slot);
/// `k`: experts of a token.
pub const EXPERT_SLOT: Dim = dim("k", Word::ExpertSlot);
/// `E`: experts.
pub const EXPERT: Dim = dim("E", Word::Expert);
/// `R`: rows in expert order.
pub const ROW: Dim = dim("R", Word::Row);

/// First token of every sequence.
pub const CU_SEQLENS: TensorArg = int(
    "cu_seqlens",
    &[BOUNDARIES],
    "first token of every sequence; unused entries repeat the last value",
);
