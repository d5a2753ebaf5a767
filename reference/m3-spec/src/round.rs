//! One correctly rounded step from f64 to a storage dtype: nearest, ties to even.
//!
//! The rounded twin rounds f64 results here and nowhere else. Going through f32 on the way to bf16 would round twice
//! and miss some ties; these functions never do.

use crate::dtype::DType;
use half::bf16;

/// Bits of an f64 significand that bf16 does not keep (52 - 7).
const DROPPED_BITS: u32 = 45;
/// Smallest normal bf16 (and f32): 2^-126.
const MIN_NORMAL: f64 = f64::from_bits((1023 - 126) << 52);
/// Inverse of the spacing of bf16 subnormals, 2^-133.
const SUBNORMAL_SCALE: f64 = f64::from_bits((1023 + 133) << 52);
const SUBNORMAL_STEP: f64 = f64::from_bits((1023 - 133) << 52);
/// First magnitude whose exponent bf16 cannot hold: 2^128.
const OVERFLOW: f64 = f64::from_bits((1023 + 128) << 52);

/// The bf16 nearest to `x` (ties to even), as an f64. Values that round past the largest finite bf16 become ±inf, NaN stays NaN.
pub fn to_bf16(x: f64) -> f64 {
    if x.is_nan() || x.is_infinite() {
        return x;
    }
    if x.abs() < MIN_NORMAL {
        // Both products are exact: powers of two, and the result of the first one is below 2^7.
        return (x * SUBNORMAL_SCALE).round_ties_even() * SUBNORMAL_STEP;
    }
    let bits = x.to_bits();
    let odd = (bits >> DROPPED_BITS) & 1;
    let half_minus_one = (1u64 << (DROPPED_BITS - 1)) - 1;
    // A carry out of the significand lands in the exponent, which is the right neighbour.
    let rounded = f64::from_bits((bits + half_minus_one + odd) >> DROPPED_BITS << DROPPED_BITS);
    if rounded.abs() >= OVERFLOW {
        f64::INFINITY.copysign(x)
    } else {
        rounded
    }
}

/// The f32 nearest to `x` (ties to even), as an f64. Overflow becomes ±inf, NaN stays NaN.
pub fn to_f32(x: f64) -> f64 {
    f64::from(x as f32)
}

/// [`to_bf16`] as the storage type.
pub fn bf16_of(x: f64) -> bf16 {
    // Exact: every bf16 is an f32, and the low half of its bits is zero.
    bf16::from_f32(to_bf16(x) as f32)
}

/// `x` rounded once to a floating-point storage dtype; other dtypes leave it as it is.
pub fn to_dtype(x: f64, dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => to_bf16(x),
        DType::F32 => to_f32(x),
        DType::I32 | DType::U32 | DType::U64 | DType::U8 => x,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_pow(e: i32) -> f64 {
        2f64.powi(e)
    }

    #[test]
    fn every_bf16_rounds_to_itself() {
        for bits in 0..=u16::MAX {
            let value = bf16::from_bits(bits);
            let back = bf16_of(f64::from(value.to_f32()));
            if value.is_nan() {
                assert!(back.is_nan());
            } else {
                assert_eq!(back.to_bits(), bits);
            }
        }
    }

    #[test]
    fn midpoints_go_to_the_even_neighbour_and_their_neighbours_to_the_nearest() {
        for bits in 0..0x7f7fu16 {
            let low = f64::from(bf16::from_bits(bits).to_f32());
            let high = f64::from(bf16::from_bits(bits + 1).to_f32());
            let middle = (low + high) / 2.0;
            let even = if bits % 2 == 0 { low } else { high };
            for sign in [1.0, -1.0] {
                assert_eq!(
                    to_bf16(sign * middle),
                    sign * even,
                    "midpoint above {bits:#06x}"
                );
                assert_eq!(
                    to_bf16(sign * middle.next_down()),
                    sign * low,
                    "below it, {bits:#06x}"
                );
                assert_eq!(
                    to_bf16(sign * middle.next_up()),
                    sign * high,
                    "above it, {bits:#06x}"
                );
            }
        }
    }

    #[test]
    fn rounding_through_f32_first_would_differ_here() {
        // 1 + 2^-8 is the midpoint of 1 and 1 + 2^-7; the small excess is lost in f32.
        let x = 1.0 + two_pow(-8) + two_pow(-40);
        assert_eq!(to_bf16(x), 1.0 + two_pow(-7));
        assert_eq!(to_bf16(to_f32(x)), 1.0);
    }

    #[test]
    fn subnormals_keep_their_spacing_and_their_sign() {
        let step = two_pow(-133);
        assert_eq!(to_bf16(step), step);
        assert_eq!(to_bf16(0.5 * step), 0.0);
        assert_eq!(to_bf16(1.5 * step), 2.0 * step);
        assert_eq!(to_bf16((0.5 * step).next_up()), step);
        assert_eq!(
            to_bf16(127.5 * step),
            128.0 * step,
            "carries into the smallest normal"
        );
        assert!(to_bf16(-0.25 * step).is_sign_negative());
        assert_eq!(to_bf16(f64::from_bits(1)), 0.0, "an f64 subnormal");
        assert!(to_bf16(-0.0).is_sign_negative());
    }

    #[test]
    fn overflow_starts_at_half_a_step_past_the_largest() {
        let max = f64::from(bf16::MAX.to_f32());
        let edge = max + two_pow(127 - 8);
        assert_eq!(to_bf16(edge.next_down()), max);
        assert_eq!(to_bf16(edge), f64::INFINITY);
        assert_eq!(to_bf16(-edge), f64::NEG_INFINITY);
        assert_eq!(to_bf16(f64::MAX), f64::INFINITY);
        assert_eq!(to_bf16(f64::NEG_INFINITY), f64::NEG_INFINITY);
    }

    #[test]
    fn nan_stays_nan() {
        assert!(to_bf16(f64::NAN).is_nan());
        assert!(
            to_bf16(f64::from_bits(0x7ff0_0000_0000_0001)).is_nan(),
            "a NaN whose upper bits look like inf"
        );
        assert!(to_f32(f64::NAN).is_nan());
        assert!(bf16_of(-f64::NAN).is_nan());
    }

    #[test]
    fn f32_rounds_ties_subnormals_and_overflow() {
        assert_eq!(to_f32(1.0 + two_pow(-24)), 1.0);
        assert_eq!(to_f32(1.0 + 3.0 * two_pow(-24)), 1.0 + two_pow(-22));
        assert_eq!(to_f32((1.0 + two_pow(-24)).next_up()), 1.0 + two_pow(-23));
        assert_eq!(to_f32(two_pow(-149)), two_pow(-149));
        assert_eq!(to_f32(two_pow(-150)), 0.0);
        assert_eq!(to_f32(two_pow(-150).next_up()), two_pow(-149));
        let edge = f64::from(f32::MAX) + two_pow(127 - 24);
        assert_eq!(to_f32(edge.next_down()), f64::from(f32::MAX));
        assert_eq!(to_f32(edge), f64::INFINITY);
    }

    #[test]
    fn integer_dtypes_are_left_alone() {
        assert_eq!(to_dtype(16_777_217.0, DType::I32), 16_777_217.0);
        assert_eq!(to_dtype(16_777_217.0, DType::F32), 16_777_216.0);
        assert_eq!(to_dtype(257.0, DType::BF16), 256.0);
    }
}
