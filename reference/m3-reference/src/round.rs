//! Roundings from f64, until the spec crate has them.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum DType {
    BF16,
    F32,
}

pub(crate) fn to_bf16(x: f64) -> f64 {
    half::bf16::from_f64(x).to_f64()
}

pub(crate) fn to_f32(x: f64) -> f64 {
    f64::from(x as f32)
}
