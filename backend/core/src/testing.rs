//! What tests, measurements and the emulated GPU of this workspace reach for beside what everybody may: the parts of a step
//! each by itself, and runtimes with something else inside. The feature `testing` opens it; nothing that is released turns it
//! on, and nothing here stays as it is for anybody.

pub use crate::exec::host::Host;
pub use crate::exec::vocab_map::of as vocab_map;
pub use crate::pages::{PageId, PageKey};
pub use crate::sequence::Shares;
pub use crate::tokenizer::decode::Detokenizer;

/// What goes into a step, and what comes out of it.
pub mod batch {
    pub use crate::batch::{
        Entry, Executor, Forward, Logits, LongPrompts, Outcome, PromptBlocks, Segment, Stepped,
        Unwanted, WANTED,
    };
    pub use crate::draft_source::{Branching, DraftLens, DraftSource, PerSource};
}

/// Drafters by themselves.
pub mod draft {
    pub use crate::draft::{
        Drafter, Eagle, Head, HeadPass, HeadSegment, HeadStates, Heads, MaskRow, Medusa, Model,
        Ngram, Proposal, Suffix, Verified,
    };
}

/// What is kept of a draft.
pub mod verify {
    pub use crate::verify::{Verdict, verify};
}

/// From logits to tokens.
pub mod sampling {
    pub use crate::sampling::context::Context;
    pub use crate::sampling::distribution::Distribution;
    pub use crate::sampling::logprob::report;
    pub use crate::sampling::sampler::{Coupling, Sampler, Stream};
}

/// The CPU executor's model, and the parts of a pass.
pub mod cpu {
    pub use crate::exec::cpu::attention::{Attention, Row};
    pub use crate::exec::cpu::kv::KvCache;
    pub use crate::exec::cpu::roofline::{quiet, read_all, time};
    pub use crate::exec::cpu::{
        Arena, Eagle, Medusa, Model, Prepared, Resources, Weight, Weights, linear, prepare,
    };
}

/// The CUDA executor's model, and the device that it runs on.
pub mod cuda {
    pub use crate::exec::cuda::{
        Driver, Eagle, Gpu, HeadOnHost, Medusa, MedusaOnHost, Model, OnHost, Pass, is_present,
    };

    /// What a device has to offer: an emulated one has it too.
    pub mod device {
        pub use crate::exec::cuda::device::pod::{Pod, bytes_of, bytes_of_mut};
        pub use crate::exec::cuda::device::{
            Address, Description, Device, Fill, Graph, Held, Kernel, Launch, Mark, Op, Product,
            ProductShape, Shared,
        };
    }

    /// How passes are launched.
    pub mod model {
        pub use crate::exec::cuda::model::half_rows::HalfRows;
        pub use crate::exec::cuda::model::shape::{
            MULTIPLY_CLUSTER, MULTIPLY_SHARED_BYTES, MULTIPLY_THREADS, OPERAND_SHARED_BYTES,
            ROW_THREADS, Tiling, gemm_launch_bytes, gemm_partials, gemm_rows, gemm_shared_bytes,
            gemm_sharing_distance, gemm_threads,
        };
        pub use crate::exec::cuda::model::{many_params, params};
    }

    /// How steps are launched.
    pub mod step {
        pub use crate::exec::cuda::step::forks::Fork;
        pub use crate::exec::cuda::step::input::{Branched, Planned, StepInput};
        pub use crate::exec::cuda::step::params;
    }
}
