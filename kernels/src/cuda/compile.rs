//! Kernel sources and their compilation: NVRTC to a cubin, kept on disk.

use std::ffi::{CStr, CString, c_char};
use std::path::PathBuf;
use std::{env, fs, process, ptr};

use cudarc::nvrtc::{result, sys};

use crate::error::{Error, Result};

/// A kernel source file.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// File name, from `kernels/cuda`.
    pub file: &'static str,
    /// Its text.
    pub text: &'static str,
}

macro_rules! sources {
    ($($file:literal),* $(,)?) => {
        [$(Source { file: $file, text: include_str!(concat!("../../cuda/", $file)) }),*]
    };
}

/// What every kernel includes.
pub const HEADERS: &[Source] = &sources!["common.cuh"];

/// Every kernel source.
pub const SOURCES: &[Source] = &sources![
    "adamw.cu",
    "columns.cu",
    "elementwise.cu",
    "embedding.cu",
    "gemm.cu",
    "grpo_loss.cu",
    "log_prob.cu",
    "moe_combine.cu",
    "moe_permute.cu",
    "qk_norm_rope.cu",
    "rms_norm.cu",
    "router.cu",
    "swigluoai.cu",
];

/// Options of every compilation, besides the target. No fast math: a division and a root are rounded as IEEE says.
const OPTIONS: &[&str] = &["--std=c++17", "--generate-line-info"];

/// Ends a file of the cache: written last, so that a torn file has none.
const TRAILER: &[u8; 8] = b"m3cubin\n";

/// Target of a compute capability: the variant with the instructions of that chip alone where there is one.
///
/// sm_90a, sm_100a and sm_103a have matrix instructions that the plain targets refuse.
pub fn target(major: i32, minor: i32) -> String {
    let suffix = match (major, minor) {
        (9, 0) | (10, 0) | (10, 3) => "a",
        _ => "",
    };
    format!("sm_{major}{minor}{suffix}")
}

/// A compiled source and what the compiler said.
pub struct Compiled {
    /// Machine code.
    pub cubin: Vec<u8>,
    /// Warnings, and the resource report when it was asked for.
    pub log: String,
}

/// NVRTC's version, if the library is there.
///
/// # Errors
/// [`Error::Library`] with the names that were tried.
pub fn version() -> Result<(i32, i32)> {
    // SAFETY: loads a library by name and drops it.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::Library {
            library: "NVRTC",
            tried: cudarc::get_lib_name_candidates("nvrtc").join(", "),
        });
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is present; both pointers are valid for a write.
    let status = unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
    status.result().map_err(|error| Error::Device {
        op: "nvrtc",
        what: format!("nvrtcVersion: {error:?}"),
    })?;
    Ok((major, minor))
}

/// Compiles a source for a target. `report` asks for registers, shared memory and spills in the log.
///
/// # Errors
/// [`Error::Library`]; [`Error::Compile`] with the compiler's own words.
pub fn compile(source: Source, target: &str, report: bool) -> Result<Compiled> {
    version()?;
    let failed = |log: String| Error::Compile {
        source_file: source.file,
        arch: target.to_owned(),
        log,
    };
    let program = Program::new(source).map_err(|error| failed(format!("{error:?}")))?;
    let mut options: Vec<String> = OPTIONS.iter().map(|&option| option.to_owned()).collect();
    options.push(format!("--gpu-architecture={target}"));
    if report {
        options.push("--ptxas-options=-v".to_owned());
    }
    // SAFETY: the program lives until the end of this function.
    let compiled = unsafe { result::compile_program(program.0, &options) };
    let log = program.log();
    match compiled.and_then(|()| program.cubin()) {
        Ok(cubin) => Ok(Compiled { cubin, log }),
        Err(error) => Err(failed(if log.is_empty() {
            format!("{error:?}")
        } else {
            log
        })),
    }
}

/// The cubin of a source, from the disk or from the compiler.
///
/// # Errors
/// As [`compile`]. A cache that cannot be read or written costs time, never the run.
pub fn cubin(source: Source, target: &str) -> Result<Vec<u8>> {
    let file = cached_file(source, target)?;
    if let Some(bytes) = file.as_ref().and_then(|file| fs::read(file).ok())
        && let Some(cubin) = bytes.strip_suffix(TRAILER)
    {
        return Ok(cubin.to_vec());
    }
    let compiled = compile(source, target, false)?;
    if let Some(file) = file {
        // The run has what it needs; the next one compiles again.
        let _ = store(&file, &compiled.cubin);
    }
    Ok(compiled.cubin)
}

/// Forgets the cached cubin of a source, after the driver refused it.
pub(super) fn forget(source: Source, target: &str) {
    if let Ok(Some(file)) = cached_file(source, target) {
        // Nothing is lost when it stays: the next run compiles again as well.
        let _ = fs::remove_file(file);
    }
}

/// The cache's folder: `M3_CACHE_DIR`, else the user's cache folder.
fn cache_folder() -> Option<PathBuf> {
    let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
    if let Some(folder) = variable("M3_CACHE_DIR") {
        return Some(PathBuf::from(folder).join("kernels"));
    }
    let user = variable("XDG_CACHE_HOME").map(PathBuf::from);
    let user = user.or_else(|| Some(PathBuf::from(variable("HOME")?).join(".cache")));
    Some(user?.join("m3").join("kernels"))
}

fn cached_file(source: Source, target: &str) -> Result<Option<PathBuf>> {
    let (major, minor) = version()?;
    let mut hash = Fnv::default();
    for part in HEADERS.iter().chain([&source]) {
        hash.add(part.file.as_bytes());
        hash.add(part.text.as_bytes());
    }
    OPTIONS
        .iter()
        .for_each(|option| hash.add(option.as_bytes()));
    hash.add(target.as_bytes());
    hash.add(format!("{major}.{minor}").as_bytes());
    let stem = source.file.trim_end_matches(".cu");
    Ok(cache_folder().map(|folder| folder.join(format!("{stem}-{target}-{:032x}.cubin", hash.0))))
}

fn store(file: &PathBuf, cubin: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    let beside = file.with_extension(format!("{}.part", process::id()));
    fs::write(&beside, [cubin, TRAILER].concat())?;
    fs::rename(&beside, file)
}

/// FNV-1a of 128 bits, over parts with their lengths.
struct Fnv(u128);

impl Default for Fnv {
    fn default() -> Self {
        Fnv(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }
}

impl Fnv {
    fn add(&mut self, part: &[u8]) {
        let length = (part.len() as u64).to_le_bytes();
        for &byte in length.iter().chain(part) {
            self.0 ^= u128::from(byte);
            self.0 = self
                .0
                .wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    }
}

/// A program of NVRTC.
struct Program(sys::nvrtcProgram);

impl Program {
    fn new(source: Source) -> std::result::Result<Self, result::NvrtcError> {
        let text = |s: &str| CString::new(s).expect("no kernel source holds a NUL");
        let headers: Vec<CString> = HEADERS.iter().map(|header| text(header.text)).collect();
        let names: Vec<CString> = HEADERS.iter().map(|header| text(header.file)).collect();
        let pointers =
            |list: &[CString]| -> Vec<*const c_char> { list.iter().map(|s| s.as_ptr()).collect() };
        let (body, name) = (text(source.text), text(source.file));
        let mut program = ptr::null_mut();
        // SAFETY: every string outlives the call, which copies them.
        let status = unsafe {
            sys::nvrtcCreateProgram(
                &mut program,
                body.as_ptr(),
                name.as_ptr(),
                HEADERS.len() as i32,
                pointers(&headers).as_ptr(),
                pointers(&names).as_ptr(),
            )
        };
        status.result()?;
        Ok(Program(program))
    }

    fn log(&self) -> String {
        // SAFETY: the program is alive.
        let Ok(raw) = (unsafe { result::get_program_log(self.0) }) else {
            return String::new();
        };
        let bytes: Vec<u8> = raw.iter().map(|&c| c as u8).collect();
        let text = CStr::from_bytes_until_nul(&bytes).map(CStr::to_string_lossy);
        text.map_or_else(|_| String::new(), |text| text.trim_end().to_owned())
    }

    fn cubin(&self) -> std::result::Result<Vec<u8>, result::NvrtcError> {
        let mut size = 0;
        // SAFETY: the program is alive and `size` is valid for a write.
        unsafe { sys::nvrtcGetCUBINSize(self.0, &mut size) }.result()?;
        let mut cubin = vec![0u8; size];
        // SAFETY: the buffer has the size NVRTC asked for.
        unsafe { sys::nvrtcGetCUBIN(self.0, cubin.as_mut_ptr().cast()) }.result()?;
        Ok(cubin)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once. A failure would leak host memory and nothing else.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chips_with_instructions_of_their_own_get_their_own_target() {
        let targets = [(8, 0), (9, 0), (10, 0), (10, 3), (12, 0)].map(|(a, b)| target(a, b));
        assert_eq!(targets, ["sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120"]);
    }

    #[test]
    fn parts_of_a_hash_do_not_run_together() {
        let hash = |parts: &[&str]| {
            let mut hash = Fnv::default();
            parts.iter().for_each(|part| hash.add(part.as_bytes()));
            hash.0
        };
        assert_ne!(hash(&["ab", "c"]), hash(&["a", "bc"]));
    }

    #[test]
    fn a_missing_compiler_is_named_with_the_files_tried() {
        if let Err(error) = version() {
            let text = error.to_string();
            assert!(
                text.contains("NVRTC") && text.contains("libnvrtc.so"),
                "{text}"
            );
        }
    }
}
