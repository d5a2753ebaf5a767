//! A released checkpoint: files and config that agree about every tensor of the text model.

use crate::error::{Error, Result};
use crate::files::{CONFIG_FILE, RawTensor, TensorFiles};
use crate::names;
use crate::staging::STAGING_DIR;
use half::bf16;
use m3_spec::config::{Config, TextConfig};
use m3_spec::dtype::DType;
use m3_spec::tensors::{TensorSpec, tensors};
use safetensors::Dtype;
use std::collections::HashSet;
use std::path::Path;

/// A checkpoint whose config, files and text tensors have all been checked; the tensors' bytes are mapped, never copied.
pub struct Checkpoint {
    config: Config,
    config_json: String,
    files: TensorFiles,
    text: Vec<TensorSpec>,
}

/// One tensor of the text model, in the file's own dtype and bytes.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Released name.
    pub name: &'a str,
    /// F32 or BF16.
    pub dtype: DType,
    /// Row-major shape, `[out, in]` for a matrix.
    pub shape: &'a [usize],
    /// The elements, little-endian, not necessarily aligned.
    pub bytes: &'a [u8],
}

impl Checkpoint {
    /// Opens the checkpoint in `dir`: `config.json` and one `model.safetensors` or an index with its shards.
    ///
    /// # Errors
    /// Every refusal of the config, every contradiction of files and index, and any text tensor that is missing,
    /// unexpected, in two shards, or of another shape or dtype than the config and the format call for.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let (config, config_json) = read_config(dir)?;
        let files = TensorFiles::open(dir)?;
        let text = tensors(&config.text);
        check_names(&files, &config.text, &text)?;
        let checkpoint = Checkpoint {
            config,
            config_json,
            files,
            text,
        };
        checkpoint.check_tensors()?;
        Ok(checkpoint)
    }

    fn check_tensors(&self) -> Result<()> {
        for expected in &self.text {
            let Some(tensor) = self.files.get(&expected.name) else {
                continue;
            };
            if tensor.shape != expected.shape {
                return Err(Error::WrongShape {
                    file: file_name(&tensor),
                    tensor: expected.name.clone(),
                    expected: expected.shape.clone(),
                    got: tensor.shape.to_vec(),
                });
            }
            float_dtype(&tensor)?;
        }
        Ok(())
    }

    /// The config.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The text of `config.json`, for a copy of the checkpoint.
    pub fn config_json(&self) -> &str {
        &self.config_json
    }

    /// All tensors of the directory, those of the text model and those passed over.
    pub fn files(&self) -> &TensorFiles {
        &self.files
    }

    /// Released names of the text tensors, in the order of the model.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.text.iter().map(|tensor| tensor.name.as_str())
    }

    /// The text tensors as the config calls for them, in the order of the model: role, layer, shape, whether trained.
    pub fn specs(&self) -> &[TensorSpec] {
        &self.text
    }

    /// The text tensor with the released name `name`.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`] for a name that the config does not call for.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        let absent = || Error::NoSuchTensor {
            dir: self.files.dir().to_owned(),
            tensor: name.to_owned(),
        };
        if names::is_passed_over(name) {
            return Err(absent());
        }
        let tensor = self.files.get(name).ok_or_else(absent)?;
        Ok(TensorView {
            name: tensor.name,
            dtype: float_dtype(&tensor)?,
            shape: tensor.shape,
            bytes: tensor.bytes,
        })
    }

    /// The tensors that are known and not read: vision, projector, merger, draft modules.
    pub fn passed_over(&self) -> impl Iterator<Item = RawTensor<'_>> {
        self.files
            .iter()
            .filter(|tensor| names::is_passed_over(tensor.name))
    }
}

impl TensorView<'_> {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    /// The values in f32; exact for both dtypes.
    ///
    /// # Errors
    /// [`Error::BufferLength`] when `out` has another length.
    pub fn read_f32(&self, out: &mut [f32]) -> Result<()> {
        self.check_length(out.len())?;
        match self.dtype {
            DType::F32 => decode(self.bytes, out, f32::from_le_bytes),
            _ => decode(self.bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        }
        Ok(())
    }

    /// The values in bf16: a stored F32 is rounded once, to nearest even.
    ///
    /// # Errors
    /// [`Error::BufferLength`] when `out` has another length.
    pub fn read_bf16(&self, out: &mut [bf16]) -> Result<()> {
        self.check_length(out.len())?;
        match self.dtype {
            DType::F32 => decode(self.bytes, out, |b| bf16::from_f32(f32::from_le_bytes(b))),
            _ => decode(self.bytes, out, bf16::from_le_bytes),
        }
        Ok(())
    }

    fn check_length(&self, got: usize) -> Result<()> {
        let expected = self.elements();
        if got == expected {
            return Ok(());
        }
        Err(Error::BufferLength {
            tensor: self.name.to_owned(),
            expected,
            got,
        })
    }
}

fn check_names(files: &TensorFiles, config: &TextConfig, text: &[TensorSpec]) -> Result<()> {
    let expected: HashSet<&str> = text.iter().map(|tensor| tensor.name.as_str()).collect();
    let is_known = |name| expected.contains(name) || names::is_passed_over(name);
    if let Some(tensor) = files.iter().find(|tensor| !is_known(tensor.name)) {
        return Err(Error::UnexpectedTensor {
            file: file_name(&tensor),
            tensor: tensor.name.to_owned(),
            hint: names::hint(tensor.name, config, text),
        });
    }
    let mut missing = text
        .iter()
        .filter(|tensor| files.get(&tensor.name).is_none());
    match missing.next() {
        None => Ok(()),
        Some(tensor) => Err(Error::MissingTensor {
            dir: files.dir().to_owned(),
            tensor: tensor.name.clone(),
            more: missing.count(),
        }),
    }
}

fn decode<const N: usize, T>(bytes: &[u8], out: &mut [T], of: impl Fn([u8; N]) -> T) {
    for (value, chunk) in out.iter_mut().zip(bytes.as_chunks().0) {
        *value = of(*chunk);
    }
}

fn float_dtype(tensor: &RawTensor) -> Result<DType> {
    match tensor.dtype {
        Dtype::F32 => Ok(DType::F32),
        Dtype::BF16 => Ok(DType::BF16),
        got => Err(Error::WrongDtype {
            file: file_name(tensor),
            tensor: tensor.name.to_owned(),
            got,
        }),
    }
}

fn file_name(tensor: &RawTensor) -> String {
    tensor.file.display().to_string()
}

fn read_config(dir: &Path) -> Result<(Config, String)> {
    let path = dir.join(CONFIG_FILE);
    let text = std::fs::read_to_string(&path).map_err(|source| {
        if source.kind() == std::io::ErrorKind::NotFound && dir.join(STAGING_DIR).is_dir() {
            return Error::Unfinished {
                dir: dir.to_owned(),
            };
        }
        let path = path.clone();
        Error::Read { path, source }
    })?;
    let config = Config::from_json(&text).map_err(|source| Error::Config {
        path: path.clone(),
        source,
    })?;
    if config.quantization.is_some() {
        return Err(Error::Quantized { path });
    }
    Ok((config, text))
}
