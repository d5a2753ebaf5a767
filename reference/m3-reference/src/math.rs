//! The few loops that every op shares.

/// Σ a·b, one running sum.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len(), "dot of unequal lengths");
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Σ a·b in eight running sums. Projections and block scores need it: one sum waits for itself at every step, and the
/// selection statistics score a hundred thousand queries.
pub fn dot_in_lanes(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len(), "dot of unequal lengths");
    let mut lanes = [0.0; 8];
    let ((a, a_tail), (b, b_tail)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a.iter().zip(b) {
        for i in 0..8 {
            lanes[i] += a[i] * b[i];
        }
    }
    lanes.iter().sum::<f64>() + dot(a_tail, b_tail)
}

/// y += a·x.
pub fn axpy(y: &mut [f64], a: f64, x: &[f64]) {
    assert_eq!(y.len(), x.len(), "axpy of unequal lengths");
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

/// 1 / (1 + e^-x).
pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Row `i` of a row-major matrix with `width` columns.
pub fn row(x: &[f64], i: usize, width: usize) -> &[f64] {
    &x[i * width..(i + 1) * width]
}

/// Mutable row `i` of a row-major matrix with `width` columns.
pub fn row_mut(x: &mut [f64], i: usize, width: usize) -> &mut [f64] {
    &mut x[i * width..(i + 1) * width]
}

/// Token ranges of the sequences of a pack. Repeated entries give empty ranges.
pub fn sequences(cu_seqlens: &[i32]) -> impl Iterator<Item = std::ops::Range<usize>> {
    cu_seqlens
        .windows(2)
        .map(|pair| index(pair[0])..index(pair[1]))
}

/// An id or offset as an index. Negative ones are a caller's mistake.
pub fn index(id: i32) -> usize {
    usize::try_from(id).expect("ids and offsets that are read are not negative")
}

/// An index as an id.
pub fn id(index: usize) -> i32 {
    i32::try_from(index).expect("ids fit in i32")
}

/// Order of two scores from best to worst: larger first, -0 equal to +0, NaN last.
pub fn best_first(a: f64, b: f64) -> std::cmp::Ordering {
    match (a.is_nan(), b.is_nan()) {
        (false, false) => b.partial_cmp(&a).expect("neither is NaN"),
        (a, b) => a.cmp(&b),
    }
}
