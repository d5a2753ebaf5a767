//! What is compared, and the checks that come before any arithmetic.

use crate::metrics::Metric;
use crate::storage::Storage;

/// One side of a comparison: a row-major tensor, widened to f64 (exact for every [`Storage`]).
#[derive(Debug, Clone, Copy)]
pub struct Operand<'a> {
    /// Where the numbers come from, e.g. `cpu backend` or `reference`. Two operands of one source
    /// are aliased: nothing would be compared.
    pub source: &'a str,
    /// Identity of the device or host buffer that was read, where the caller has one.
    pub buffer: Option<u64>,
    /// Extents, outermost first.
    pub shape: &'a [usize],
    /// Elements, row-major.
    pub values: &'a [f64],
}

/// Everything a metric may look at.
#[derive(Debug, Clone, Copy)]
pub struct Operands<'a> {
    /// What the subject produced.
    pub got: Option<Operand<'a>>,
    /// What is right, in f64.
    pub reference: Option<Operand<'a>>,
    /// The reference's maths with the rounding points of the storage type; only ratios need it.
    pub twin: Option<Operand<'a>>,
    /// How the subject stores the tensor.
    pub storage: Storage,
}

/// Class of a value in the mask that must match before values are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Any finite value.
    Finite,
    /// Not a number.
    Nan,
    /// Positive infinity.
    PosInf,
    /// Negative infinity.
    NegInf,
}

impl Class {
    /// Class of `x`.
    pub fn of(x: f64) -> Self {
        if x.is_nan() {
            Class::Nan
        } else if x == f64::INFINITY {
            Class::PosInf
        } else if x == f64::NEG_INFINITY {
            Class::NegInf
        } else {
            Class::Finite
        }
    }
}

/// Why a comparison has no number. Every one of these is ERROR, never PASS.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum MeasureError {
    /// An operand that the metric needs was not given.
    #[error("{operand} is missing, and {metric} needs it")]
    Missing {
        /// `got`, `reference` or `twin`.
        operand: &'static str,
        /// The metric asked for.
        metric: &'static str,
    },
    /// An operand without elements: agreement over nothing says nothing.
    #[error("{operand} has no elements (shape {shape:?}): nothing was compared")]
    Empty {
        /// `got`, `reference` or `twin`.
        operand: &'static str,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// Two operands are the same thing.
    #[error("{first} and {second} are one and the same {what}: a tensor agrees with itself")]
    Aliased {
        /// One operand.
        first: &'static str,
        /// The other.
        second: &'static str,
        /// What they share.
        what: String,
    },
    /// The shapes differ.
    #[error("{operand} has shape {got:?}, reference has {expected:?}")]
    Shape {
        /// `got` or `twin`.
        operand: &'static str,
        /// The reference's shape.
        expected: Vec<usize>,
        /// The operand's shape.
        got: Vec<usize>,
    },
    /// Fewer or more elements than the shape says.
    #[error("{operand} holds {got} elements, its shape {shape:?} needs {expected}")]
    Length {
        /// `got`, `reference` or `twin`.
        operand: &'static str,
        /// Its shape.
        shape: Vec<usize>,
        /// Product of the shape.
        expected: usize,
        /// Elements given.
        got: usize,
    },
    /// A NaN in an operand.
    #[error("{operand} holds {count} NaN, the first at element {first}")]
    Nan {
        /// `got`, `reference` or `twin`.
        operand: &'static str,
        /// How many.
        count: usize,
        /// Flat index of the first.
        first: usize,
    },
    /// Infinities do not stand in the same places with the same sign.
    #[error(
        "{operand} and reference differ in {count} infinities, the first at element {first}: \
         reference {expected}, {operand} {got}"
    )]
    InfMask {
        /// `got` or `twin`.
        operand: &'static str,
        /// How many positions differ.
        count: usize,
        /// Flat index of the first.
        first: usize,
        /// The reference's value there.
        expected: f64,
        /// The operand's value there.
        got: f64,
    },
    /// Every element is a matching infinity, so no difference exists.
    #[error("no element is finite: {metric} has nothing to measure")]
    NoFinite {
        /// The metric asked for.
        metric: &'static str,
    },
    /// A ratio over too few elements.
    #[error(
        "{metric} over {got} elements: below {min} the twin's error is no scale; use an absolute \
         metric, or say in the gate why fewer do: small = \"...\""
    )]
    TooFew {
        /// The metric asked for.
        metric: &'static str,
        /// Elements compared.
        got: usize,
        /// Elements needed.
        min: usize,
    },
    /// The twin is exact, so its error is no scale.
    #[error(
        "the twin's error is 0, so {metric} has no scale; give the gate a floor with a reason, or \
         use an absolute metric"
    )]
    ZeroTwin {
        /// The metric asked for.
        metric: &'static str,
    },
    /// A relative metric met a zero in the reference.
    #[error("reference is 0 where got is {got} (element {first}): {metric} is not defined there")]
    ZeroReference {
        /// The metric asked for.
        metric: &'static str,
        /// Flat index of the first such element.
        first: usize,
        /// The subject's value there.
        got: f64,
    },
    /// The arithmetic left the range of f64.
    #[error("{metric} is not finite ({value})")]
    NotFinite {
        /// The metric asked for.
        metric: &'static str,
        /// What came out.
        value: f64,
    },
}

/// Operands that passed the checks; `twin` is there iff the metric needs it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Checked<'a> {
    pub got: Operand<'a>,
    pub reference: Operand<'a>,
    pub twin: Option<Operand<'a>>,
    pub storage: Storage,
}

impl<'a> Operands<'a> {
    /// Presence, identity, shapes, then non-finite masks, in this order and before any arithmetic.
    pub(crate) fn check(&self, metric: Metric) -> Result<Checked<'a>, MeasureError> {
        let checked = self.check_shapes(metric)?;
        if metric != Metric::FiniteMatch {
            checked.check_masks()?;
        }
        Ok(checked)
    }

    fn check_shapes(&self, metric: Metric) -> Result<Checked<'a>, MeasureError> {
        let need = |operand: Option<Operand<'a>>, name| {
            operand.ok_or(MeasureError::Missing {
                operand: name,
                metric: metric.name(),
            })
        };
        let got = need(self.got, "got")?;
        let reference = need(self.reference, "reference")?;
        let twin = if metric.needs_twin() {
            Some(need(self.twin, "twin")?)
        } else {
            None
        };
        refuse_aliased(("got", got), ("reference", reference))?;
        if let Some(twin) = twin {
            refuse_aliased(("got", got), ("twin", twin))?;
            refuse_aliased(("reference", reference), ("twin", twin))?;
        }
        check_length("reference", reference)?;
        for (name, operand) in [("got", Some(got)), ("twin", twin)] {
            let Some(operand) = operand else { continue };
            if operand.shape != reference.shape {
                return Err(MeasureError::Shape {
                    operand: name,
                    expected: reference.shape.to_vec(),
                    got: operand.shape.to_vec(),
                });
            }
            check_length(name, operand)?;
        }
        Ok(Checked {
            got,
            reference,
            twin,
            storage: self.storage,
        })
    }
}

impl Checked<'_> {
    fn check_masks(&self) -> Result<(), MeasureError> {
        refuse_nan("reference", self.reference)?;
        refuse_nan("got", self.got)?;
        same_infinities("got", self.got, self.reference)?;
        if let Some(twin) = self.twin {
            refuse_nan("twin", twin)?;
            same_infinities("twin", twin, self.reference)?;
        }
        Ok(())
    }
}

fn refuse_aliased(
    (first, a): (&'static str, Operand<'_>),
    (second, b): (&'static str, Operand<'_>),
) -> Result<(), MeasureError> {
    let what = if a.source == b.source {
        format!("source ({})", a.source)
    } else if a.buffer.is_some() && a.buffer == b.buffer {
        "buffer".to_owned()
    } else if !a.values.is_empty() && a.values.as_ptr() == b.values.as_ptr() {
        "memory".to_owned()
    } else {
        return Ok(());
    };
    Err(MeasureError::Aliased {
        first,
        second,
        what,
    })
}

fn check_length(name: &'static str, operand: Operand<'_>) -> Result<(), MeasureError> {
    let product = operand
        .shape
        .iter()
        .try_fold(1usize, |n, &extent| n.checked_mul(extent));
    let expected = product.unwrap_or(usize::MAX);
    if expected != operand.values.len() {
        return Err(MeasureError::Length {
            operand: name,
            shape: operand.shape.to_vec(),
            expected,
            got: operand.values.len(),
        });
    }
    if expected == 0 {
        return Err(MeasureError::Empty {
            operand: name,
            shape: operand.shape.to_vec(),
        });
    }
    Ok(())
}

fn refuse_nan(name: &'static str, operand: Operand<'_>) -> Result<(), MeasureError> {
    let Some(first) = operand.values.iter().position(|x| x.is_nan()) else {
        return Ok(());
    };
    let count = operand.values.iter().filter(|x| x.is_nan()).count();
    Err(MeasureError::Nan {
        operand: name,
        count,
        first,
    })
}

fn same_infinities(
    name: &'static str,
    operand: Operand<'_>,
    reference: Operand<'_>,
) -> Result<(), MeasureError> {
    let differs = |i: usize| Class::of(operand.values[i]) != Class::of(reference.values[i]);
    let mut differing = (0..operand.values.len()).filter(|&i| differs(i));
    let Some(first) = differing.next() else {
        return Ok(());
    };
    Err(MeasureError::InfMask {
        operand: name,
        count: 1 + differing.count(),
        first,
        expected: reference.values[first],
        got: operand.values[first],
    })
}
