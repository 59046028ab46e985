//! Products of many rows by cuBLASLt, which is loaded at run time. How a product of a shape is computed is chosen once,
//! by the library's own heuristic, and kept: the same shape gives the same sums for a row as long as library, GPU and
//! process are the same. Across versions of the library nothing is promised.
#![allow(unsafe_code)]

use super::cublas_calls::{self as calls, Choice, Failure, check};
use super::device::{Address, PRODUCT_BYTES, Product};
use super::places::Places;
use crate::model::Dtype;
use crate::{Error, Result};
use cudarc::cublaslt::sys;
use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr;

/// How it gets onto a machine.
const REMEDY: &str = "install it with `pip install nvidia-cublas` or a CUDA 13 toolkit and name its folder by \
     SPEC_CUDA_LIB, or compute prompts exactly (prefill = exact)";

/// `CUBLAS_OP_T` of `cublasOperation_t`, which is declared with a library that is not used here.
const TRANSPOSED: i32 = 1;

/// What a choice is kept for.
type Key = (Dtype, usize, usize, usize);

/// The library on one device.
pub(super) struct Cublas {
    handle: sys::cublasLtHandle_t,
    /// [`PRODUCT_BYTES`] of the device.
    workspace: Address,
    plans: HashMap<Key, Plan>,
}

/// How products of a shape are computed.
struct Plan {
    product: sys::cublasLtMatmulDesc_t,
    weights: sys::cublasLtMatrixLayout_t,
    input: sys::cublasLtMatrixLayout_t,
    output: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Cublas {
    /// Finds and loads the library for the current device.
    pub(super) fn open(places: &Places, workspace: Address) -> Result<Self> {
        calls::open(places).map_err(missing)?;
        let mut handle = ptr::null_mut();
        // SAFETY: a pointer to a local.
        let created = unsafe { calls::cublasLtCreate(&mut handle) };
        check(created).map_err(|error| failure("cublasLtCreate", error))?;
        Ok(Self { handle, workspace, plans: HashMap::new() })
    }

    /// Issues a product to a stream of the current device.
    pub(super) fn multiply(&mut self, product: &Product, stream: sys::cudaStream_t) -> Result<()> {
        let Product { format, weights, input, output, m, n, k } = *product;
        let key = (format, m, n, k);
        if !self.plans.contains_key(&key) {
            let plan = Plan::new(self.handle, product);
            let name = format!("cuBLASLt, {m} rows by {n} x {k} in {format}");
            self.plans.insert(key, plan.map_err(|error| failure(&name, error))?);
        }
        let plan = &self.plans[&key];
        let (one, zero) = (1f32, 0f32);
        // SAFETY: descriptions and handle live as long as `self`; the arrays are the caller's, as large as the product
        // says, and the workspace is as large as the heuristic was told.
        let issued = unsafe {
            calls::cublasLtMatmul(
                self.handle,
                plan.product,
                (&raw const one).cast(),
                weights as *const c_void,
                plan.weights,
                input as *const c_void,
                plan.input,
                (&raw const zero).cast(),
                output as *const c_void,
                plan.output,
                output as *mut c_void,
                plan.output,
                &plan.algorithm,
                self.workspace as *mut c_void,
                PRODUCT_BYTES,
                stream,
            )
        };
        check(issued).map_err(|error| failure("cublasLtMatmul", error))
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
    /// Rows that follow each other are columns to the library: it multiplies the transposed weights, as it has them, with
    /// the input, as it has that, to the transposed output. FP8 is only taken so.
    fn new(handle: sys::cublasLtHandle_t, shape: &Product) -> Result<Self, Failure> {
        let Product { format, m, n, k, .. } = *shape;
        let element = match format {
            Dtype::Fp8 => sys::cudaDataType_t::CUDA_R_8F_E4M3,
            _ => sys::cudaDataType_t::CUDA_R_16F,
        };
        let float = sys::cudaDataType_t::CUDA_R_32F;
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let mut plan = Self {
            product: ptr::null_mut(),
            weights: ptr::null_mut(),
            input: ptr::null_mut(),
            output: ptr::null_mut(),
            // SAFETY: an opaque array of integers, written below.
            algorithm: unsafe { std::mem::zeroed() },
        };
        // SAFETY: a pointer to a place for the description.
        check(unsafe { calls::cublasLtMatmulDescCreate(&mut plan.product, compute, float) })?;
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        // Sums of FP8 are kept in f32, and not in the fewer bits that some GPUs are faster with.
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &0i8)?;
        plan.weights = layout(element, k, n)?;
        plan.input = layout(element, k, m)?;
        plan.output = layout(float, n, m)?;
        plan.algorithm = plan.choose(handle)?;
        Ok(plan)
    }

    fn set<T: Copy>(
        &self,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: &T,
    ) -> Result<(), Failure> {
        let value: *const T = value;
        // SAFETY: the description lives; the value is read at once, by its own size.
        check(unsafe {
            let bytes = size_of::<T>();
            calls::cublasLtMatmulDescSetAttribute(self.product, attribute, value.cast(), bytes)
        })
    }

    /// What the library holds to be fastest in the workspace that there is.
    fn choose(&self, handle: sys::cublasLtHandle_t) -> Result<sys::cublasLtMatmulAlgo_t, Failure> {
        let mut preference = ptr::null_mut();
        // SAFETY: a pointer to a local.
        check(unsafe { calls::cublasLtMatmulPreferenceCreate(&mut preference) })?;
        let chosen = self.choose_by(handle, preference);
        // SAFETY: destroyed once, after its last use.
        let _ = unsafe { calls::cublasLtMatmulPreferenceDestroy(preference) };
        chosen
    }

    fn choose_by(
        &self,
        handle: sys::cublasLtHandle_t,
        preference: sys::cublasLtMatmulPreference_t,
    ) -> Result<sys::cublasLtMatmulAlgo_t, Failure> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let Self { product, weights, input, output, .. } = *self;
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
                product,
                weights,
                input,
                output,
                output,
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
}

/// Columns of so many rows, one after the other.
fn layout(
    element: sys::cudaDataType,
    rows: usize,
    columns: usize,
) -> Result<sys::cublasLtMatrixLayout_t, Failure> {
    let mut layout = ptr::null_mut();
    // SAFETY: a pointer to a local.
    check(unsafe {
        let (rows, columns) = (rows as u64, columns as u64);
        calls::cublasLtMatrixLayoutCreate(&mut layout, element, rows, columns, rows as i64)
    })?;
    Ok(layout)
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: each is destroyed once; those that were never made are null.
        unsafe {
            for layout in [self.weights, self.input, self.output] {
                if !layout.is_null() {
                    let _ = calls::cublasLtMatrixLayoutDestroy(layout);
                }
            }
            if !self.product.is_null() {
                let _ = calls::cublasLtMatmulDescDestroy(self.product);
            }
        }
    }
}

fn missing(what: impl std::fmt::Display) -> Error {
    Error::Device(format!("prefill = cublaslt needs cuBLASLt: {what}: {REMEDY}"))
}

fn failure(what: &str, error: Failure) -> Error {
    Error::Device(format!("{what}: {}", error.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::cuda::cublas_calls::LIBRARY;

    #[test]
    fn a_missing_library_is_named_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let places = Places { named: Some(dir.path().into()), ..Places::default() };
        let error = Cublas::open(&places, 0).err().unwrap().to_string();
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
        let places = Places { named: Some(dir.path().into()), ..Places::default() };
        let error = Cublas::open(&places, 0).err().unwrap().to_string();
        assert!(error.contains(&path.display().to_string()), "{error}");
    }
}
