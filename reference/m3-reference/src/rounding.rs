//! The rounding points of profile S, as methods that do nothing in exact mode.

use m3_spec::dtype::DType;
use m3_spec::round::{to_bf16, to_f32};

/// How a forward or backward pass rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// f64 everywhere.
    Exact,
    /// f64 inside an op, rounded at the pinned points of profile S.
    Twin {
        /// Type in which weights, activations and their gradients are stored: BF16 or F32.
        storage: DType,
    },
}

/// Where a value ends that an op may hand over either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// The storage type.
    Storage,
    /// fp32, for values that are summed or compared before they are rounded (router logits, partial gradients).
    Fp32,
}

impl Rounding {
    /// The twin with bf16 storage.
    pub const BF16: Self = Self::Twin {
        storage: DType::BF16,
    };
    /// The twin with f32 storage.
    pub const F32: Self = Self::Twin {
        storage: DType::F32,
    };

    /// One rounding to the storage type: an activation, or its gradient, leaves an op.
    ///
    /// # Panics
    /// If the storage type of the twin is neither BF16 nor F32.
    pub fn store(&self, x: f64) -> f64 {
        match self {
            Self::Exact => x,
            Self::Twin {
                storage: DType::BF16,
            } => to_bf16(x),
            Self::Twin {
                storage: DType::F32,
            } => to_f32(x),
            Self::Twin { storage } => panic!("{storage} does not store activations"),
        }
    }

    /// One rounding to a bf16 GEMM operand (P, dS, dlogits). With f32 storage these stay in registers, unrounded.
    pub fn operand(&self, x: f64) -> f64 {
        match self {
            Self::Twin {
                storage: DType::BF16,
            } => to_bf16(x),
            _ => x,
        }
    }

    /// One rounding to fp32: statistics, router values, log-probs, weight gradients.
    pub fn fp32(&self, x: f64) -> f64 {
        match self {
            Self::Exact => x,
            Self::Twin { .. } => to_f32(x),
        }
    }

    /// One rounding to whichever the op was asked for.
    pub fn to(&self, precision: Precision, x: f64) -> f64 {
        match precision {
            Precision::Storage => self.store(x),
            Precision::Fp32 => self.fp32(x),
        }
    }

    /// [`Self::store`] of every element.
    pub fn store_all(&self, mut x: Vec<f64>) -> Vec<f64> {
        x.iter_mut().for_each(|x| *x = self.store(*x));
        x
    }

    /// [`Self::fp32`] of every element.
    pub fn fp32_all(&self, mut x: Vec<f64>) -> Vec<f64> {
        x.iter_mut().for_each(|x| *x = self.fp32(*x));
        x
    }

    /// [`Self::to`] of every element.
    pub fn to_all(&self, precision: Precision, mut x: Vec<f64>) -> Vec<f64> {
        x.iter_mut().for_each(|x| *x = self.to(precision, *x));
        x
    }
}
