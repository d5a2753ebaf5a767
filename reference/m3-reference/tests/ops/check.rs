//! Seeded inputs and the derivative check.

use m3_reference::math::dot;
use m3_spec::dtype::DType;
use m3_spec::inputs::{Distribution, Inputs};

/// Values in [-1, 1), the same for the same seed.
pub fn uniform(seed: u64, len: usize) -> Vec<f64> {
    let distribution = Distribution::Uniform { lo: -1.0, hi: 1.0 };
    Inputs::new(seed, "reference").f64s("uniform", distribution, DType::F32, len)
}

/// Compares `gradients` with central differences of `loss` in eight random directions through all inputs at once, then
/// in one direction through each input alone, so that no small gradient hides behind a large one.
pub fn assert_derivative(
    inputs: &[Vec<f64>],
    gradients: &[Vec<f64>],
    loss: impl Fn(&[Vec<f64>]) -> f64,
) {
    assert_eq!(inputs.len(), gradients.len());
    for direction in 0..8 + inputs.len() {
        let along: Vec<Vec<f64>> = inputs
            .iter()
            .enumerate()
            .map(|(i, x)| match direction.checked_sub(8) {
                Some(only) if only != i => vec![0.0; x.len()],
                _ => uniform(1000 * direction as u64 + i as u64, x.len()),
            })
            .collect();
        let at = |h: f64| {
            let step =
                |(x, d): (&Vec<f64>, &Vec<f64>)| x.iter().zip(d).map(|(x, d)| x + h * d).collect();
            loss(&inputs.iter().zip(&along).map(step).collect::<Vec<_>>())
        };
        // Fourth order: the truncation error is far below the bound at a step that keeps cancellation small too.
        let h = 1e-3;
        let expected = (8.0 * (at(h) - at(-h)) - (at(2.0 * h) - at(-2.0 * h))) / (12.0 * h);
        let got: f64 = gradients.iter().zip(&along).map(|(g, d)| dot(g, d)).sum();
        let error = (got - expected).abs() / expected.abs();
        assert!(
            error <= 1e-6,
            "direction {direction}: {got} against {expected}, rel {error:.1e}"
        );
    }
}

/// |a − b| ≤ bound for every element; NaN fails.
#[track_caller]
pub fn assert_close(a: &[f64], b: &[f64], bound: f64) {
    assert_eq!(a.len(), b.len());
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert!(
            a == b || (a - b).abs() <= bound,
            "element {i}: {a} against {b}"
        );
    }
}
