//! Names for the extents of an op, and the small expressions that shapes are written in.

use std::collections::BTreeMap;

/// Whether an extent varies from step to step or belongs to the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AxisKind {
    /// Changes with the pack: tokens, sequences, visible pairs.
    Var,
    /// Fixed by the model.
    Const,
}

/// A named extent of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Axis {
    /// Name as shapes use it.
    pub name: &'static str,
    /// Varying or fixed.
    pub kind: AxisKind,
    /// What it counts.
    pub meaning: &'static str,
}

/// An extent that varies with the pack.
pub const fn var(name: &'static str, meaning: &'static str) -> Axis {
    Axis {
        name,
        kind: AxisKind::Var,
        meaning,
    }
}

/// An extent that the model fixes.
pub const fn fixed(name: &'static str, meaning: &'static str) -> Axis {
    Axis {
        name,
        kind: AxisKind::Const,
        meaning,
    }
}

/// What is wrong with a set of axis values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AxisError {
    /// A value for an axis that the op does not have.
    #[error("{op} has no axis {axis}; it has {known}")]
    Unknown {
        /// The op.
        op: &'static str,
        /// The name given.
        axis: String,
        /// The op's axes.
        known: String,
    },
    /// An axis without a value.
    #[error("{op} needs a value for axis {axis} ({meaning})")]
    Missing {
        /// The op.
        op: &'static str,
        /// The axis.
        axis: &'static str,
        /// What it counts.
        meaning: &'static str,
    },
}

/// A value for each axis of an op.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AxisValues(BTreeMap<&'static str, u64>);

impl AxisValues {
    /// Values for all axes of the op `op`, and for no other name.
    ///
    /// # Errors
    /// [`AxisError`] for a name that is not an axis, or an axis without a value.
    pub fn new(
        op: &'static str,
        axes: &'static [Axis],
        values: &[(&str, u64)],
    ) -> Result<Self, AxisError> {
        let mut map = BTreeMap::new();
        for &(name, value) in values {
            let Some(axis) = axes.iter().find(|axis| axis.name == name) else {
                let known: Vec<_> = axes.iter().map(|axis| axis.name).collect();
                return Err(AxisError::Unknown {
                    op,
                    axis: name.into(),
                    known: known.join(", "),
                });
            };
            map.insert(axis.name, value);
        }
        match axes.iter().find(|axis| !map.contains_key(axis.name)) {
            None => Ok(AxisValues(map)),
            Some(axis) => Err(AxisError::Missing {
                op,
                axis: axis.name,
                meaning: axis.meaning,
            }),
        }
    }

    /// The value of an axis.
    ///
    /// # Panics
    /// If the op has no such axis: a mistake in a spec, which the tests of the registry rule out.
    pub fn get(&self, name: &str) -> u64 {
        match self.0.get(name) {
            Some(&value) => value,
            None => panic!("no axis {name} among {:?}", self.0.keys()),
        }
    }

    /// The value of an expression over axes: products, then sums, of names and integers, as in `T*k` and `E+1`.
    ///
    /// # Panics
    /// As [`AxisValues::get`].
    pub fn eval(&self, expression: &str) -> u64 {
        let factor = |token: &str| token.parse().unwrap_or_else(|_| self.get(token));
        let term = |term: &str| term.split('*').map(str::trim).map(factor).product::<u64>();
        expression.split('+').map(term).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AXES: &[Axis] = &[var("T", "tokens"), fixed("k", "slots")];

    #[test]
    fn expressions_multiply_before_they_add() {
        let values = AxisValues::new("op", AXES, &[("T", 5), ("k", 3)]).unwrap();
        assert_eq!(values.eval("T"), 5);
        assert_eq!(values.eval("T*k+1"), 16);
        assert_eq!(values.eval("2*T + k"), 13);
    }

    #[test]
    fn unknown_and_missing_axes_are_named() {
        let unknown = AxisValues::new("op", AXES, &[("T", 5), ("K", 3)])
            .unwrap_err()
            .to_string();
        assert!(
            unknown.contains("no axis K") && unknown.contains("T, k"),
            "{unknown}"
        );
        let missing = AxisValues::new("op", AXES, &[("T", 5)])
            .unwrap_err()
            .to_string();
        assert!(missing.contains("axis k (slots)"), "{missing}");
    }
}
