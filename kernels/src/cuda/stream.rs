//! An ordered queue, with the scratch memory of its operations.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaStream as Queue, result, sys};

use super::device::Device;
use super::fault::{FAULT_BYTES, Fault};
use super::memory::CudaBuffer;
use crate::error::{Error, Result};

/// Alignment of every part of the scratch memory, in bytes.
const ALIGNMENT: usize = 256;

/// An ordered queue of operations on a GPU.
///
/// Scratch memory belongs to the queue, since its operations run one after another. It grows to the largest need and
/// stays where it is from then on, so a captured graph finds it again: warm up before capturing.
pub struct CudaStream {
    inner: Result<Inner>,
}

struct Inner {
    device: Arc<Device>,
    queue: Arc<Queue>,
    fault: CudaBuffer,
    scratch: Mutex<Option<CudaBuffer>>,
}

/// The queue while one operation enqueues its launches.
pub(super) struct Enqueue<'a> {
    pub(super) device: &'a Device,
    pub(super) stream: sys::CUstream,
    pub(super) op: &'static str,
    inner: &'a Inner,
    scratch: MutexGuard<'a, Option<CudaBuffer>>,
}

impl CudaStream {
    /// A new queue. A refusal of the driver is kept and returned by the first operation.
    pub(super) fn new(device: &Arc<Device>) -> Self {
        let inner = || {
            let queue = device.context.new_stream();
            let queue = queue.map_err(|error| super::failed("stream", "new".into(), error))?;
            Ok(Inner {
                device: device.clone(),
                queue,
                fault: device.pool.alloc(FAULT_BYTES)?,
                scratch: Mutex::new(None),
            })
        };
        CudaStream { inner: inner() }
    }

    /// Makes the context current on this thread and holds the queue for one operation.
    pub(super) fn enqueue(&self, op: &'static str) -> Result<Enqueue<'_>> {
        let inner = self.inner.as_ref().map_err(Error::clone)?;
        let bound = inner.device.context.bind_to_thread();
        bound.map_err(|error| super::failed(op, "context".into(), error))?;
        Ok(Enqueue {
            device: &inner.device,
            stream: inner.queue.cu_stream(),
            op,
            inner,
            scratch: inner.scratch.lock().unwrap_or_else(PoisonError::into_inner),
        })
    }
}

impl Enqueue<'_> {
    /// Memory for the parts of these sizes, in bytes; what it holds is whatever was there before.
    pub(super) fn scratch<const N: usize>(&mut self, parts: [usize; N]) -> Result<[u64; N]> {
        let starts = {
            let mut end = 0;
            parts.map(|bytes| {
                let start = end;
                end += bytes.next_multiple_of(ALIGNMENT);
                (start as u64, end)
            })
        };
        let needed = starts.last().map_or(0, |&(_, end)| end).max(1);
        let held = self.scratch.as_ref().map_or(0, CudaBuffer::bytes);
        if held < needed || self.scratch.is_none() {
            // The smaller block goes back first; allocating waits for what still uses it.
            *self.scratch = None;
            *self.scratch = Some(self.device.pool.alloc(needed)?);
        }
        let base = self.scratch.as_ref().map_or(0, CudaBuffer::address);
        Ok(starts.map(|(start, _)| base + start))
    }

    /// Zeroes memory of the scratch.
    pub(super) fn zero(&self, address: u64, bytes: usize) -> Result<()> {
        // SAFETY: callers pass a part of the scratch that they asked for in this size.
        unsafe { result::memset_d8_async(address, 0, bytes, self.stream) }
            .map_err(|error| self.failed(format!("zeros of {bytes} bytes"), error))
    }

    /// Where kernels note an index that points nowhere.
    pub(super) fn fault(&self) -> u64 {
        self.inner.fault.address()
    }

    /// Number of an operand of this operation that holds indices.
    pub(super) fn site(&self, tensor: &'static str) -> u32 {
        self.device.sites.number(self.op, tensor)
    }

    /// Names what the driver refused.
    pub(super) fn failed(&self, what: String, error: result::DriverError) -> Error {
        super::failed(self.op, what, error)
    }

    /// Waits for the queue, and returns what a kernel found since the last wait.
    pub(super) fn wait(&self) -> Result<()> {
        let failed = |error| self.failed("an operation enqueued before it failed".into(), error);
        let mut bytes = [0; FAULT_BYTES];
        // SAFETY: the fault buffer has this size; both buffers live until the queue is idle.
        unsafe {
            result::memcpy_dtoh_async(&mut bytes, self.fault(), self.stream).map_err(failed)?;
            result::stream::synchronize(self.stream).map_err(failed)?;
        }
        let Some(error) = self.device.sites.error(Fault::from_bytes(bytes)) else {
            return Ok(());
        };
        // SAFETY: as above.
        unsafe { result::memset_d8_async(self.fault(), 0, FAULT_BYTES, self.stream) }
            .map_err(failed)?;
        Err(error)
    }
}
