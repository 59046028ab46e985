//! Values that are copied to and from a device as they lie in memory.
#![allow(unsafe_code)]

/// Values without padding, for which any bytes are valid.
///
/// # Safety
/// The type is `repr(C)` or a primitive number, has no padding, and every bit pattern is a value of it.
pub unsafe trait Pod: Copy + 'static {}

// SAFETY: primitive numbers have no padding and no invalid values.
unsafe impl Pod for u8 {}
// SAFETY: as above.
unsafe impl Pod for u32 {}
// SAFETY: as above.
unsafe impl Pod for u64 {}
// SAFETY: as above.
unsafe impl Pod for f32 {}

/// The bytes of some values, in the order of the host, which is that of the device.
pub fn bytes_of<T: Pod>(values: &[T]) -> &[u8] {
    // SAFETY: `Pod` types have no padding, so all bytes are initialised; the lifetime is that of `values`.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The same, to write to.
pub fn bytes_of_mut<T: Pod>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as for `bytes_of`; any bytes are valid values, and the borrow is exclusive.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// Defines structs that kernels have too, and checks that they have no padding.
macro_rules! device_structs {
    ($($(#[$meta:meta])* $name:ident is $size:literal bytes {
        $($(#[$field_meta:meta])* $field:ident: $kind:ty,)*
    })*) => {$(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub struct $name {
            $($(#[$field_meta])* pub $field: $kind,)*
        }

        const _: () = assert!(size_of::<$name>() == $size, "as on the device");
        // Without padding the fields fill the struct.
        const _: () = assert!(0 $(+ size_of::<$kind>())* == $size, "no padding");

        // SAFETY: `repr(C)`, numbers and structs of numbers only, and just checked to have no padding.
        unsafe impl $crate::exec::cuda::device::pod::Pod for $name {}
    )*};
}
pub(in crate::exec::cuda) use device_structs;
