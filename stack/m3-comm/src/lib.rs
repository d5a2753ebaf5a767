//! Communicators: what the ranks of a run exchange. One process owns one device; a run of a single rank is [`Solo`].
//!
//! A communicator works on backend tensors and enqueues on the caller's stream, like an operation. Sums are taken in
//! rank order, so that the bits do not depend on which rank is slow.

use m3_kernels::{Backend, Result, Tensor};

/// Exchange between the ranks of one group.
pub trait Communicator<B: Backend>: Send + Sync {
    /// This process within the group, from 0.
    fn rank(&self) -> usize;

    /// Number of processes in the group.
    fn size(&self) -> usize;

    /// Replaces `tensor` by its sum over all ranks.
    ///
    /// # Errors
    /// What the transport reports.
    fn all_reduce_sum(&self, backend: &B, stream: &B::Stream, tensor: &Tensor<B>) -> Result<()>;
}

/// A group of one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Solo;

impl<B: Backend> Communicator<B> for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn all_reduce_sum(&self, _: &B, _: &B::Stream, _: &Tensor<B>) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use m3_kernels::cpu::CpuBackend;

    #[test]
    fn a_sum_over_one_rank_is_the_tensor_itself() {
        let (backend, solo) = (CpuBackend::default(), Solo);
        let stream = backend.stream();
        let tensor = Tensor::from_slice(&backend, &stream, &[1.0f32, -0.0], [2]).unwrap();
        solo.all_reduce_sum(&backend, &stream, &tensor).unwrap();
        let bits: Vec<u32> = tensor
            .to_vec::<f32>(&backend, &stream)
            .unwrap()
            .iter()
            .map(|x| x.to_bits())
            .collect();
        assert_eq!(bits, [1.0f32.to_bits(), (-0.0f32).to_bits()]);
        assert_eq!(
            (
                Communicator::<CpuBackend>::rank(&solo),
                Communicator::<CpuBackend>::size(&solo)
            ),
            (0, 1)
        );
    }
}
