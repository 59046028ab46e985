//! Products of many rows by cuBLASLt, which is loaded at run time. How a product of a shape is computed is chosen once,
//! by the library's own heuristic, and kept: the same shape gives the same sums for a row as long as library, GPU and
//! process are the same. Across versions of the library nothing is promised.
#![allow(unsafe_code)]

use super::device::{Address, PRODUCT_BYTES, Product};
use super::places::Places;
use crate::model::Dtype;
use crate::{Error, Result};
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use std::collections::HashMap;
use std::ffi::c_void;
use std::path::Path;
use std::ptr;

/// The library, by the name of its major version.
const LIBRARY: &str = "libcublasLt.so.13";
/// How it gets onto a machine.
const REMEDY: &str = "install it with `pip install nvidia-cublas` or a CUDA 13 toolkit and name its folder by \
     SPEC_CUDA_LIB, or compute prompts exactly (prefill = exact)";
/// The first version of the interface used here, as `cublasLtGetVersion` counts.
const MIN_VERSION: usize = 130_000;

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
        load(places)?;
        let handle = result::create_handle().map_err(|error| failure("cublasLtCreate", error))?;
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
            result::matmul(
                self.handle,
                plan.product,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                weights as *const c_void,
                plan.weights,
                input as *const c_void,
                plan.input,
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
        issued.map_err(|error| failure("cublasLtMatmul", error))
    }
}

impl Drop for Cublas {
    fn drop(&mut self) {
        self.plans.clear();
        // SAFETY: the handle is destroyed once; errors are of no use to anyone here.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

impl Plan {
    /// Rows that follow each other are columns to the library: it multiplies the transposed weights, as it has them, with
    /// the input, as it has that, to the transposed output. FP8 is only taken so.
    fn new(handle: sys::cublasLtHandle_t, shape: &Product) -> Result<Self, CublasError> {
        let Product { format, m, n, k, .. } = *shape;
        let element = match format {
            Dtype::Fp8 => sys::cudaDataType_t::CUDA_R_8F_E4M3,
            _ => sys::cudaDataType_t::CUDA_R_16F,
        };
        let float = sys::cudaDataType_t::CUDA_R_32F;
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let mut plan = Self {
            product: result::create_matmul_desc(compute, float)?,
            weights: ptr::null_mut(),
            input: ptr::null_mut(),
            output: ptr::null_mut(),
            // SAFETY: an opaque array of integers, written below.
            algorithm: unsafe { std::mem::zeroed() },
        };
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        // Sums of FP8 are kept in f32, and not in the fewer bits that some GPUs are faster with.
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &0i8)?;
        plan.weights = result::create_matrix_layout(element, k as u64, n as u64, k as i64)?;
        plan.input = result::create_matrix_layout(element, k as u64, m as u64, k as i64)?;
        plan.output = result::create_matrix_layout(float, n as u64, m as u64, n as i64)?;
        plan.algorithm = plan.choose(handle)?;
        Ok(plan)
    }

    fn set<T: Copy>(
        &self,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: &T,
    ) -> Result<(), CublasError> {
        let value: *const T = value;
        // SAFETY: the description lives; the value is read at once, by its own size.
        unsafe {
            result::set_matmul_desc_attribute(self.product, attribute, value.cast(), size_of::<T>())
        }
    }

    /// What the library holds to be fastest in the workspace that there is.
    fn choose(
        &self,
        handle: sys::cublasLtHandle_t,
    ) -> Result<sys::cublasLtMatmulAlgo_t, CublasError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = result::create_matmul_pref()?;
        // SAFETY: all descriptions live; the preference is destroyed once, after its last use.
        unsafe {
            let limit = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            let bytes: *const usize = &PRODUCT_BYTES;
            let limited = result::set_matmul_pref_attribute(
                preference,
                limit,
                bytes.cast(),
                size_of::<usize>(),
            );
            let found = limited.and_then(|()| {
                let Self { product, weights, input, output, .. } = *self;
                result::get_matmul_algo_heuristic(
                    handle, product, weights, input, output, output, preference,
                )
            });
            let _ = result::destroy_matmul_pref(preference);
            Ok(found?.algo)
        }
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: each is destroyed once; those that were never made are null.
        unsafe {
            for layout in [self.weights, self.input, self.output] {
                if !layout.is_null() {
                    let _ = result::destroy_matrix_layout(layout);
                }
            }
            let _ = result::destroy_matmul_desc(self.product);
        }
    }
}

/// Loads the library: from a folder that is known to hold it, else by the loader.
fn load(places: &Places) -> Result<()> {
    if let Some(folder) = places.folder(LIBRARY).map_err(missing)? {
        open_path(&folder.join(LIBRARY))?;
    }
    // SAFETY: opens the library by name, which finds it again where it was opened by its path; its initialisers are safe
    // to run.
    if !unsafe { sys::is_culib_present() } {
        return Err(missing(format!("the loader does not find {LIBRARY}")));
    }
    // SAFETY: the library is there; the function takes nothing.
    let version = unsafe { sys::cublasLtGetVersion() };
    if version < MIN_VERSION {
        return Err(missing(format!("version {version} was found, {MIN_VERSION} is needed")));
    }
    Ok(())
}

/// Keeps a library for the rest of the process.
fn open_path(path: &Path) -> Result<()> {
    use std::os::unix::ffi::OsStrExt as _;
    let name = std::ffi::CString::new(path.as_os_str().as_bytes())
        .map_err(|_| missing(format!("{} is no path", path.display())))?;
    // SAFETY: the name is a C string; initialisers of the library are safe to run, and it is never closed.
    let opened = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if opened.is_null() {
        return Err(missing(format!("{} cannot be loaded", path.display())));
    }
    Ok(())
}

fn missing(what: impl std::fmt::Display) -> Error {
    Error::Device(format!("prefill = cublaslt needs cuBLASLt: {what}: {REMEDY}"))
}

fn failure(what: &str, error: CublasError) -> Error {
    Error::Device(format!("{what}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(error.contains(&format!("{} cannot be loaded", path.display())), "{error}");
    }
}
