//! Planted faults: a backend whose calls pass through a function that may change their operands or their results, so
//! that a gate can be shown to catch what it is there to catch. No kernel knows of it, and a release build has none.

use std::sync::Arc;

use super::{CpuBackend, CpuStream};
use crate::backend::{Backend, for_each_operation};
use crate::error::Result;
use crate::ops;

/// What stands in for every operation: it gets a sound backend and the call, and makes the call or another one.
pub type Fault = Arc<dyn Fn(&CpuBackend, Call<'_>) -> Result<()> + Send + Sync>;

macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident: $args:ident in $module:ident,)*) => {
        /// One call of an operation.
        #[derive(Clone, Copy)]
        pub enum Call<'a> {
            $($(#[$doc])* $args(&'a ops::$args<'a, CpuBackend>),)*
        }

        impl Call<'_> {
            /// The operation with its operands as they came.
            ///
            /// # Errors
            /// What the operation refuses or reports.
            pub fn run(self, backend: &CpuBackend) -> Result<()> {
                match self {
                    $(Call::$args(args) => backend.$name(&CpuStream, args),)*
                }
            }
        }
    };
}
for_each_operation!(calls);

impl CpuBackend {
    /// The same backend with every call going through `fault`.
    pub fn with_fault(&self, fault: Fault) -> Self {
        CpuBackend {
            fault: Some(fault),
            ..self.clone()
        }
    }

    /// The same backend without a fault.
    pub(super) fn sound(&self) -> Self {
        CpuBackend {
            fault: None,
            ..self.clone()
        }
    }
}
