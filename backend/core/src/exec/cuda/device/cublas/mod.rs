//! Products of many rows by cuBLASLt, which is loaded at run time. How a product of a shape is computed is chosen once,
//! by the library's own heuristic, and kept: the same shape gives the same sums for a row as long as library, GPU and
//! process are the same. Across versions of the library nothing is promised.
#![allow(unsafe_code)]

mod calls;
mod descriptors;

use super::search_path::SearchPath;
use super::{Address, PRODUCT_BYTES, Product, ProductShape};
use crate::{Error, Result};
use calls::{Choice, Failure, check};
use cudarc::cublaslt::sys;
use descriptors::Descriptors;
use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr;

/// How it gets onto a machine.
const REMEDY: &str = "install it with `pip install nvidia-cublas` or a CUDA 13 toolkit and name its folder by \
     SPEC_CUDA_LIB, or compute prompts exactly (prefill = exact)";

/// What helps where it is there and does not do it.
const WAY_OUT: &str = "compute prompts exactly (prefill = exact)";

/// The library on one device.
pub(super) struct Cublas {
    handle: sys::cublasLtHandle_t,
    /// [`PRODUCT_BYTES`] of the device.
    workspace: Address,
    plans: HashMap<ProductShape, Plan>,
}

/// How products of a shape are computed.
struct Plan {
    descriptors: Descriptors,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Cublas {
    /// Finds and loads the library for the current device; it is to be told [where to work](Self::work_in).
    pub(super) fn open(places: &SearchPath) -> Result<Self> {
        calls::open(places).map_err(missing)?;
        let mut handle = ptr::null_mut();
        // SAFETY: a pointer to a local.
        let created = unsafe { calls::cublasLtCreate(&mut handle) };
        check(created).map_err(|error| impossible("cublasLtCreate", &error))?;
        Ok(Self { handle, workspace: 0, plans: HashMap::new() })
    }

    /// Gives it memory of the device, [`PRODUCT_BYTES`].
    pub(super) fn work_in(&mut self, workspace: Address) {
        self.workspace = workspace;
    }

    /// Chooses how products of a shape are computed. The error says that there is no way.
    pub(super) fn enable(&mut self, shape: &ProductShape) -> Result<()> {
        if !self.plans.contains_key(shape) {
            let plan = Plan::new(self.handle, shape).map_err(|error| {
                let ProductShape { format, m, n, k } = shape;
                impossible(&format!("{m} rows by {n} x {k} in {format}"), &error)
            })?;
            self.plans.insert(*shape, plan);
        }
        Ok(())
    }

    /// Issues a product of an enabled shape to a stream of the current device.
    pub(super) fn multiply(&self, product: &Product, stream: sys::cudaStream_t) -> Result<()> {
        let Product { shape, weights, input, output } = *product;
        let Plan { descriptors, algorithm } =
            self.plans.get(&shape).expect("the shape has been enabled");
        let (one, zero) = (1f32, 0f32);
        // SAFETY: descriptions and handle live as long as `self`; the arrays are the caller's, as large as the product
        // says, and the workspace is as large as the heuristic was told.
        let issued = unsafe {
            calls::cublasLtMatmul(
                self.handle,
                descriptors.product,
                (&raw const one).cast(),
                weights as *const c_void,
                descriptors.weights,
                input as *const c_void,
                descriptors.input,
                (&raw const zero).cast(),
                output as *const c_void,
                descriptors.output,
                output as *mut c_void,
                descriptors.output,
                algorithm,
                self.workspace as *mut c_void,
                PRODUCT_BYTES,
                stream,
            )
        };
        check(issued).map_err(|error| Error::Device(format!("cublasLtMatmul: {}", error.0)))
    }
}

impl Drop for Cublas {
    fn drop(&mut self) {
        self.plans.clear();
        // SAFETY: the handle is destroyed once; errors are of no use to anyone here.
        let _ = unsafe { calls::cublasLtDestroy(self.handle) };
    }
}

impl Plan {
    fn new(handle: sys::cublasLtHandle_t, shape: &ProductShape) -> Result<Self, Failure> {
        let descriptors = Descriptors::new(shape)?;
        let algorithm = choose(handle, &descriptors)?;
        Ok(Self { descriptors, algorithm })
    }
}

/// What the library holds to be fastest in the workspace that there is.
fn choose(
    handle: sys::cublasLtHandle_t,
    descriptors: &Descriptors,
) -> Result<sys::cublasLtMatmulAlgo_t, Failure> {
    let mut preference = ptr::null_mut();
    // SAFETY: a pointer to a local.
    check(unsafe { calls::cublasLtMatmulPreferenceCreate(&mut preference) })?;
    let chosen = choose_by(handle, descriptors, preference);
    // SAFETY: destroyed once, after its last use.
    let _ = unsafe { calls::cublasLtMatmulPreferenceDestroy(preference) };
    chosen
}

fn choose_by(
    handle: sys::cublasLtHandle_t,
    descriptors: &Descriptors,
    preference: sys::cublasLtMatmulPreference_t,
) -> Result<sys::cublasLtMatmulAlgo_t, Failure> {
    use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
    let limit = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
    let bytes: *const usize = &PRODUCT_BYTES;
    let (mut choice, mut num_found) = (MaybeUninit::<Choice>::uninit(), 0);
    // SAFETY: all descriptions live; the library writes as many choices as it says.
    let choice = unsafe {
        check(calls::cublasLtMatmulPreferenceSetAttribute(
            preference,
            limit,
            bytes.cast(),
            size_of::<usize>(),
        ))?;
        check(calls::cublasLtMatmulAlgoGetHeuristic(
            handle,
            descriptors.product,
            descriptors.weights,
            descriptors.input,
            descriptors.output,
            descriptors.output,
            preference,
            1,
            choice.as_mut_ptr(),
            &mut num_found,
        ))?;
        if num_found == 0 {
            return Err(Failure("the library has no way to compute it".into()));
        }
        choice.assume_init()
    };
    check(choice.status).map(|()| choice.algorithm)
}

fn missing(what: impl std::fmt::Display) -> Error {
    Error::Device(format!("prefill = cublaslt needs cuBLASLt: {what}: {REMEDY}"))
}

fn impossible(what: &str, error: &Failure) -> Error {
    Error::Device(format!("prefill = cublaslt: {what}: {}: {WAY_OUT}", error.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::cuda::is_present;
    use calls::LIBRARY;

    #[test]
    fn a_missing_library_is_named_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let places = SearchPath { named: Some(dir.path().into()), ..SearchPath::default() };
        let error = Cublas::open(&places).err().unwrap().to_string();
        for part in ["prefill = cublaslt", LIBRARY, "pip install nvidia-cublas", "prefill = exact"]
        {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_file_that_is_no_library_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(LIBRARY);
        std::fs::write(&path, "no library").unwrap();
        let places = SearchPath { named: Some(dir.path().into()), ..SearchPath::default() };
        let error = Cublas::open(&places).err().unwrap().to_string();
        assert!(error.contains(&path.display().to_string()), "{error}");
    }

    #[test]
    fn a_library_that_finds_no_gpu_names_what_it_says_and_the_way_out() {
        let places = SearchPath::of_process(None);
        if is_present() || !matches!(places.folder(LIBRARY), Ok(Some(_))) {
            return eprintln!("skipped: there is a GPU, or no {LIBRARY}");
        }
        let error = Cublas::open(&places).err().unwrap().to_string();
        for part in ["cublasLtCreate: CUBLAS_STATUS_NOT_INITIALIZED", "prefill = exact"] {
            assert!(error.contains(part), "{error}");
        }
    }
}
