//! Host memory of the CPU backend.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use crate::error::{Error, Result};
use crate::tensor::ALIGNMENT;

/// Reference-counted host memory. Operations lock the buffers they touch while they run, so views of one buffer may be
/// used from several threads without a data race.
#[derive(Clone)]
pub struct CpuBuffer(Arc<Memory>);

struct Memory {
    start: NonNull<u8>,
    bytes: usize,
    layout: Layout,
    lock: Mutex<()>,
}

// SAFETY: the memory is owned by this value and every access to it holds `lock`.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl CpuBuffer {
    /// Zero-filled memory.
    pub(super) fn zeroed(bytes: usize) -> Result<Self> {
        let failed = || Error::OutOfMemory {
            device: "cpu".into(),
            bytes,
        };
        // A buffer of no bytes still has an address of its own.
        let layout = Layout::from_size_align(bytes.max(1), ALIGNMENT).map_err(|_| failed())?;
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(failed)?;
        Ok(CpuBuffer(Arc::new(Memory {
            start,
            bytes,
            layout,
            lock: Mutex::new(()),
        })))
    }

    /// Size, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// First byte. Reading and writing needs the lock.
    pub(super) fn start(&self) -> NonNull<u8> {
        self.0.start
    }

    /// Excludes every other operation on this buffer.
    pub(super) fn lock(&self) -> &Mutex<()> {
        &self.0.lock
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout, freed once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}
