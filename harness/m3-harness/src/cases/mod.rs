//! Every operation as a list of cases: inputs, reference, twin and subject, and the tensors that gates judge.

mod attention;
mod embedding;
mod experts;
mod linear;
mod loss;
mod norm;
mod optimizer;
mod selection;

use m3_kernels::{Backend, Result};
use m3_spec::dtype::DType;

use crate::lab::Lab;

/// Runs reference, twin and subject.
type Body<B> = Box<dyn Fn(&mut Lab<'_, B>) -> Result<()> + Send + Sync>;

/// One case of an operation.
pub struct Case<B: Backend> {
    /// Operation.
    pub op: &'static str,
    /// `op::dtype/variant`.
    pub name: String,
    /// Storage dtype.
    pub storage: DType,
    run: Body<B>,
}

impl<B: Backend> Case<B> {
    /// Runs reference, twin and subject; the lab then holds what is to be judged.
    ///
    /// # Errors
    /// What the subject refuses or its device reports.
    pub fn run(&self, lab: &mut Lab<'_, B>) -> Result<()> {
        (self.run)(lab)
    }
}

/// Every case of every operation, in the order of the model.
pub fn all<B: Backend>() -> Vec<Case<B>> {
    let mut list = List(Vec::new());
    embedding::add(&mut list);
    linear::add(&mut list);
    norm::add(&mut list);
    attention::add(&mut list);
    selection::add(&mut list);
    experts::add(&mut list);
    loss::add(&mut list);
    optimizer::add(&mut list);
    list.0
}

/// Cases in the making.
struct List<B: Backend>(Vec<Case<B>>);

impl<B: Backend> List<B> {
    /// One case in bf16 and one in f32.
    fn both<F>(&mut self, op: &'static str, variant: &str, run: F)
    where
        F: Fn(&mut Lab<'_, B>) -> Result<()> + Clone + Send + Sync + 'static,
    {
        self.one(op, variant, DType::BF16, run.clone());
        self.one(op, variant, DType::F32, run);
    }

    /// One case in one dtype.
    fn one<F>(&mut self, op: &'static str, variant: &str, storage: DType, run: F)
    where
        F: Fn(&mut Lab<'_, B>) -> Result<()> + Send + Sync + 'static,
    {
        let dtype = if storage == DType::BF16 {
            "bf16"
        } else {
            "f32"
        };
        let name = format!("{op}::{dtype}/{variant}");
        self.0.push(Case {
            op,
            name,
            storage,
            run: Box::new(run),
        });
    }
}
