//! Tensors as they cross the border: typed, shaped, in host memory, nothing about them trusted yet.

use crate::error::{Error, Result};

/// Element types of Triton.
///
/// ```
/// use triton_backend::DataType;
///
/// // As a model configuration names it: `data_type: TYPE_STRING`.
/// assert_eq!(DataType::Bytes.config_name(), "STRING");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum DataType {
    /// One byte, 0 or 1.
    Bool = 1,
    /// 8-bit unsigned.
    Uint8 = 2,
    /// 16-bit unsigned.
    Uint16 = 3,
    /// 32-bit unsigned.
    Uint32 = 4,
    /// 64-bit unsigned.
    Uint64 = 5,
    /// 8-bit signed.
    Int8 = 6,
    /// 16-bit signed.
    Int16 = 7,
    /// 32-bit signed.
    Int32 = 8,
    /// 64-bit signed.
    Int64 = 9,
    /// IEEE half.
    Fp16 = 10,
    /// IEEE single.
    Fp32 = 11,
    /// IEEE double.
    Fp64 = 12,
    /// Strings: for each element its length as a little-endian u32, then its bytes.
    Bytes = 13,
    /// bfloat16.
    Bf16 = 14,
}

impl DataType {
    const ALL: [Self; 14] = [
        Self::Bool,
        Self::Uint8,
        Self::Uint16,
        Self::Uint32,
        Self::Uint64,
        Self::Int8,
        Self::Int16,
        Self::Int32,
        Self::Int64,
        Self::Fp16,
        Self::Fp32,
        Self::Fp64,
        Self::Bytes,
        Self::Bf16,
    ];

    /// The type with this number in Triton's C interface.
    pub fn from_raw(raw: u32) -> Result<Self> {
        let known = Self::ALL.into_iter().find(|datatype| *datatype as u32 == raw);
        known.ok_or_else(|| Error::invalid_arg(format!("data type {raw} is not known")))
    }

    /// Its name in a model configuration, after `TYPE_`.
    pub fn config_name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::Uint8 => "UINT8",
            Self::Uint16 => "UINT16",
            Self::Uint32 => "UINT32",
            Self::Uint64 => "UINT64",
            Self::Int8 => "INT8",
            Self::Int16 => "INT16",
            Self::Int32 => "INT32",
            Self::Int64 => "INT64",
            Self::Fp16 => "FP16",
            Self::Fp32 => "FP32",
            Self::Fp64 => "FP64",
            Self::Bytes => "STRING",
            Self::Bf16 => "BF16",
        }
    }
}

/// A tensor in host memory.
///
/// ```
/// use triton_backend::{DataType, Tensor};
///
/// let numbers = [1i32, -1, 7];
/// let tensor = Tensor {
///     name: "OUTPUT".into(),
///     datatype: DataType::Int32,
///     shape: vec![1, 3],
///     data: numbers.iter().flat_map(|number| number.to_le_bytes()).collect(),
/// };
/// assert_eq!(tensor.num_elements(), Ok(3));
///
/// // The shape and the elements are what somebody sent: they may be anything.
/// let odd = Tensor { shape: vec![i64::MAX, 3], ..tensor };
/// assert!(odd.num_elements().is_err());
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Its name in the model configuration.
    pub name: String,
    /// Type of its elements.
    pub datatype: DataType,
    /// Its dimensions, the batch first where the model batches.
    pub shape: Vec<i64>,
    /// Its elements, little-endian, row after row.
    pub data: Vec<u8>,
}

impl Tensor {
    /// Elements that the shape promises.
    pub fn num_elements(&self) -> Result<usize> {
        let count = self.shape.iter().try_fold(1usize, |count, &dim| {
            usize::try_from(dim).ok().and_then(|dim| count.checked_mul(dim))
        });
        count.ok_or_else(|| {
            Error::invalid_arg(format!("input '{}' has shape {:?}", self.name, self.shape))
        })
    }
}

/// The value of a request parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum Parameter {
    /// Text.
    String(String),
    /// A whole number.
    Int(i64),
    /// Yes or no.
    Bool(bool),
    /// A fraction.
    Double(f64),
}
