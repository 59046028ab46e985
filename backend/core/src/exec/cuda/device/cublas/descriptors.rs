//! What a product is to cuBLASLt. Rows that follow each other are columns to the library: it multiplies the transposed
//! weights, as it has them, with the input, as it has that, to the transposed output. FP8 is only taken so.
#![allow(unsafe_code)]

use super::calls::{self as calls, Failure, check};
use crate::exec::cuda::device::ProductShape;
use crate::model::Dtype;
use cudarc::cublaslt::sys;
use std::ptr;

/// `CUBLAS_OP_T` of `cublasOperation_t`, which is declared with a library that is not used here.
const TRANSPOSED: i32 = 1;

/// Descriptions of a product and its arrays; they need no GPU.
pub(super) struct Descriptors {
    pub(super) product: sys::cublasLtMatmulDesc_t,
    pub(super) weights: sys::cublasLtMatrixLayout_t,
    pub(super) input: sys::cublasLtMatrixLayout_t,
    pub(super) output: sys::cublasLtMatrixLayout_t,
}

impl Descriptors {
    /// Describes the products of a shape; the library is loaded.
    pub(super) fn new(shape: &ProductShape) -> Result<Self, Failure> {
        let ProductShape { format, m, n, k } = *shape;
        let element = match format {
            Dtype::Fp8 => sys::cudaDataType_t::CUDA_R_8F_E4M3,
            _ => sys::cudaDataType_t::CUDA_R_16F,
        };
        let float = sys::cudaDataType_t::CUDA_R_32F;
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let mut all = Self {
            product: ptr::null_mut(),
            weights: ptr::null_mut(),
            input: ptr::null_mut(),
            output: ptr::null_mut(),
        };
        // SAFETY: a pointer to a place for the description.
        check(unsafe { calls::cublasLtMatmulDescCreate(&mut all.product, compute, float) })?;
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        all.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        // Sums of FP8 are kept in f32, and not in the fewer bits that some GPUs are faster with.
        all.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &0i8)?;
        all.weights = layout(element, k, n)?;
        all.input = layout(element, k, m)?;
        all.output = layout(float, n, m)?;
        Ok(all)
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

impl Drop for Descriptors {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::cuda::device::library::Library;
    use crate::exec::cuda::device::search_path::SearchPath;
    use std::ffi::{CString, c_void};
    use sys::cublasLtMatmulDescAttributes_t as Of;
    use sys::cublasLtMatrixLayoutAttribute_t as OfLayout;

    /// The other direction, which nobody but these tests takes.
    mod read {
        use cudarc::cublaslt::sys;
        use std::ffi::c_void;

        crate::exec::cuda::device::library::functions! {
            cublasLtMatmulDescGetAttribute(
                product: sys::cublasLtMatmulDesc_t,
                attribute: sys::cublasLtMatmulDescAttributes_t,
                value: *mut c_void,
                bytes: usize,
                written: *mut usize,
            ) -> u32;
            cublasLtMatrixLayoutGetAttribute(
                layout: sys::cublasLtMatrixLayout_t,
                attribute: sys::cublasLtMatrixLayoutAttribute_t,
                value: *mut c_void,
                bytes: usize,
                written: *mut usize,
            ) -> u32;
        }
    }

    /// Loads the library, if there is one.
    fn is_here() -> bool {
        let places = SearchPath::of_process(None);
        let Ok(Some(folder)) = places.folder(calls::LIBRARY) else {
            eprintln!("skipped: there is no {}", calls::LIBRARY);
            return false;
        };
        calls::open(&places).unwrap();
        let path = folder.join(calls::LIBRARY).into_os_string().into_encoded_bytes();
        read::load(&Library::open(&CString::new(path).unwrap()).unwrap()).unwrap();
        true
    }

    /// What the library answers, which has to be as long as it is taken for.
    fn answer<T: Default>(ask: impl FnOnce(*mut c_void, usize, *mut usize) -> u32) -> T {
        let (mut value, mut written) = (T::default(), 0);
        check(ask((&raw mut value).cast(), size_of::<T>(), &mut written)).unwrap();
        assert_eq!(written, size_of::<T>());
        value
    }

    fn of<T: Default>(all: &Descriptors, attribute: Of) -> T {
        // SAFETY: the description lives; the others are a place and its size.
        answer(|value, bytes, written| unsafe {
            read::cublasLtMatmulDescGetAttribute(all.product, attribute, value, bytes, written)
        })
    }

    fn of_layout<T: Default>(layout: sys::cublasLtMatrixLayout_t, attribute: OfLayout) -> T {
        // SAFETY: the description lives; the others are a place and its size.
        answer(|value, bytes, written| unsafe {
            read::cublasLtMatrixLayoutGetAttribute(layout, attribute, value, bytes, written)
        })
    }

    /// Element, rows, columns, and elements from a column to the next.
    fn read_layout(layout: sys::cublasLtMatrixLayout_t) -> (u32, u64, u64, i64) {
        let by_columns: i32 = of_layout(layout, OfLayout::CUBLASLT_MATRIX_LAYOUT_ORDER);
        assert_eq!(by_columns, 0);
        (
            of_layout(layout, OfLayout::CUBLASLT_MATRIX_LAYOUT_TYPE),
            of_layout(layout, OfLayout::CUBLASLT_MATRIX_LAYOUT_ROWS),
            of_layout(layout, OfLayout::CUBLASLT_MATRIX_LAYOUT_COLS),
            of_layout(layout, OfLayout::CUBLASLT_MATRIX_LAYOUT_LD),
        )
    }

    /// Numbers of the library's headers, of version 13.
    const F32: u32 = 0;
    const F16: u32 = 2;
    const E4M3: u32 = 28;
    const COMPUTE_F32: u32 = 68;

    #[test]
    fn the_library_has_products_as_they_were_described() {
        if !is_here() {
            return;
        }
        for (format, element) in [(Dtype::Fp16, F16), (Dtype::Fp8, E4M3)] {
            let shape = ProductShape { format, m: 256, n: 192, k: 640 };
            let all = Descriptors::new(&shape).unwrap();
            assert_eq!(of::<u32>(&all, Of::CUBLASLT_MATMUL_DESC_COMPUTE_TYPE), COMPUTE_F32);
            assert_eq!(of::<u32>(&all, Of::CUBLASLT_MATMUL_DESC_SCALE_TYPE), F32);
            let transposed = [Of::CUBLASLT_MATMUL_DESC_TRANSA, Of::CUBLASLT_MATMUL_DESC_TRANSB];
            assert_eq!(transposed.map(|of_side| of::<i32>(&all, of_side)), [1, 0]);
            assert_eq!(of::<i8>(&all, Of::CUBLASLT_MATMUL_DESC_FAST_ACCUM), 0);
            // Factors are read on the host, and there are no others.
            assert_eq!(of::<i32>(&all, Of::CUBLASLT_MATMUL_DESC_POINTER_MODE), 0);
            assert_eq!(of::<u64>(&all, Of::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER), 0);
            assert_eq!(of::<u64>(&all, Of::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER), 0);
            assert_eq!(read_layout(all.weights), (element, 640, 192, 640));
            assert_eq!(read_layout(all.input), (element, 640, 256, 640));
            assert_eq!(read_layout(all.output), (F32, 192, 256, 192));
        }
    }

    #[test]
    fn the_library_refuses_what_has_another_size() {
        if !is_here() {
            return;
        }
        let shape = ProductShape { format: Dtype::Fp16, m: 128, n: 64, k: 64 };
        let all = Descriptors::new(&shape).unwrap();
        let refused = all.set(Of::CUBLASLT_MATMUL_DESC_TRANSA, &1i8).unwrap_err();
        assert_eq!(refused.0, "CUBLAS_STATUS_INVALID_VALUE");
    }
}
