//! The `--device` argument.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;
use m3_kernels::cpu::CpuBackend;
use m3_spec::dtype::DType;

/// Device that a verb runs on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// The CPU backend.
    #[default]
    Cpu,
    /// GPU of this number, from 0.
    Cuda(usize),
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || "use cpu, cuda or cuda:N, N from 0".to_owned();
        match text.split_once(':') {
            None if text == "cpu" => Ok(Device::Cpu),
            None if text == "cuda" => Ok(Device::Cuda(0)),
            Some(("cuda", ordinal)) if ordinal.bytes().all(|b| b.is_ascii_digit()) => {
                ordinal.parse().map(Device::Cuda).map_err(|_| unknown())
            }
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => write!(f, "cpu"),
            Device::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// Storage dtype of a verb that computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Precision {
    /// fp32 throughout, for parity with other implementations.
    F32,
    /// bfloat16 storage, fp32 inside.
    #[default]
    Bf16,
}

impl Precision {
    /// The dtype.
    pub fn dtype(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
        }
    }
}

/// A CPU backend of so many threads, one per core when nothing is said.
pub fn cpu(threads: Option<usize>) -> Result<CpuBackend, m3_kernels::Error> {
    threads.map_or_else(|| Ok(CpuBackend::default()), CpuBackend::new)
}

/// Evaluates `$then` with `$backend` bound to the device's backend; returns from the function when it is absent.
macro_rules! with_backend {
    ($device:expr, $threads:expr, $backend:ident => $then:expr) => {
        match $device {
            $crate::device::Device::Cpu => {
                let $backend = $crate::device::cpu($threads)?;
                $then
            }
            $crate::device::Device::Cuda(ordinal) => {
                let $backend = m3_kernels::cuda::CudaBackend::open(ordinal)?;
                $then
            }
        }
    };
}
pub(crate) use with_backend;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_read_as_it_is_printed() {
        for device in [Device::Cpu, Device::Cuda(0), Device::Cuda(7)] {
            assert_eq!(device.to_string().parse(), Ok(device));
        }
        assert_eq!("cuda".parse(), Ok(Device::Cuda(0)));
    }

    #[test]
    fn other_spellings_are_refused() {
        for text in [
            "", "gpu", "CPU", "cuda:", "cuda:-1", "cuda:+1", "cuda:0x1", "cpu:0",
        ] {
            assert!(text.parse::<Device>().is_err(), "{text}");
        }
    }
}
