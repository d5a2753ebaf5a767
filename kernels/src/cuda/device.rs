//! A GPU: probe, context, modules.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, CudaFunction, CudaModule, result, sys};
use cudarc::nvrtc::Ptx;

use super::compile::{self, Source};
use super::fault::Sites;
use super::memory::Pool;
use crate::error::{Error, Result};

/// Least compute capability: bf16 matrix instructions and asynchronous copies begin there.
const LEAST: (i32, i32) = (8, 0);

/// What all handles of an opened GPU share.
pub(super) struct Device {
    pub(super) context: Arc<CudaContext>,
    pub(super) name: String,
    pub(super) capability: (i32, i32),
    pub(super) driver: i32,
    pub(super) pool: Arc<Pool>,
    pub(super) sites: Sites,
    target: String,
    modules: Mutex<HashMap<&'static str, Arc<CudaModule>>>,
    functions: Mutex<HashMap<(&'static str, &'static str), CudaFunction>>,
}

/// Why there is no GPU to open, if so. Touches no context.
pub(super) fn probe(ordinal: usize) -> Result<()> {
    let none = |reason: String| Error::NoDevice { reason };
    // SAFETY: loads a library by name and drops it.
    if !unsafe { sys::is_culib_present() } {
        return Err(none(
            "the driver's library libcuda is not on this machine".into(),
        ));
    }
    let words = |error| format!("the driver does not start: {error:?}");
    result::init().map_err(|error| none(words(error)))?;
    let count = result::device::get_count().map_err(|error| none(words(error)))?;
    if usize::try_from(count).is_ok_and(|count| ordinal < count) {
        return Ok(());
    }
    Err(none(format!(
        "GPU {ordinal} was asked for, the driver has {count}"
    )))
}

impl Device {
    /// Opens the GPU `ordinal`; `limit_bytes` of its memory may be used.
    pub(super) fn open(ordinal: usize, limit_bytes: Option<usize>) -> Result<Self> {
        probe(ordinal)?;
        compile::version()?;
        let refused = |error| super::failed("open", format!("GPU {ordinal}"), error);
        let context = CudaContext::new(ordinal).map_err(refused)?;
        // Operations order themselves by their stream; events per buffer would only cost.
        // SAFETY: no buffer of cudarc's own kind is ever made.
        unsafe { context.disable_event_tracking() };
        let (major, minor) = context.compute_capability().map_err(refused)?;
        let name = context.name().map_err(refused)?;
        if (major, minor) < LEAST {
            return Err(Error::UnsupportedArch {
                device: name,
                major,
                minor,
            });
        }
        let (free, _) = context.mem_get_info().map_err(refused)?;
        let mut driver = 0;
        // SAFETY: the pointer is valid for a write.
        unsafe { sys::cuDriverGetVersion(&mut driver) }
            .result()
            .map_err(refused)?;
        let limit = limit_bytes.unwrap_or(free);
        Ok(Device {
            pool: Pool::new(context.clone(), format!("{name} (cuda:{ordinal})"), limit),
            context,
            name,
            capability: (major, minor),
            driver,
            sites: Sites::default(),
            target: compile::target(major, minor),
            modules: Mutex::default(),
            functions: Mutex::default(),
        })
    }

    /// The kernel `name` of the source file `file`.
    pub(super) fn function(&self, file: &'static str, name: &'static str) -> Result<CudaFunction> {
        let mut functions = self
            .functions
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(&(file, name)) {
            return Ok(function.clone());
        }
        let module = self.module(file)?;
        let function = module
            .load_function(name)
            .map_err(|error| super::failed("load", format!("kernel {name} of {file}"), error))?;
        functions.insert((file, name), function.clone());
        Ok(function)
    }

    fn module(&self, file: &'static str) -> Result<Arc<CudaModule>> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(file) {
            return Ok(module.clone());
        }
        let source = compile::SOURCES.iter().find(|source| source.file == file);
        let source = *source.expect("every launcher names a file of the list of sources");
        let module = self.load(source)?;
        modules.insert(file, module.clone());
        Ok(module)
    }

    fn load(&self, source: Source) -> Result<Arc<CudaModule>> {
        let load = |cubin: Vec<u8>| self.context.load_module(Ptx::from_binary(cubin));
        let cached = compile::cubin(source, &self.target)?;
        load(cached).or_else(|_| {
            // A file that another driver or a failing disk left behind: once more, from the source.
            compile::forget(source, &self.target);
            load(compile::cubin(source, &self.target)?)
                .map_err(|error| super::failed("load", source.file.to_owned(), error))
        })
    }
}
