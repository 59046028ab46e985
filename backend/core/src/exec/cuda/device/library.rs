//! Libraries that are looked up when they are needed, each under the one name of the version that is used, and their
//! functions. What a function returns stays a number: a newer library may return what is not known here.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

/// A library that stays for the rest of the process.
pub(in crate::exec::cuda::device) struct Library(NonNull<c_void>);

impl Library {
    /// Loads it, by a path or by a name that the loader finds; the error is the loader's.
    pub(in crate::exec::cuda::device) fn open(name: &CStr) -> Result<Self, String> {
        // SAFETY: the name is a C string; initialisers of these libraries are safe to run.
        let opened = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        NonNull::new(opened).map(Self).ok_or_else(|| {
            // SAFETY: takes nothing; after a failure the text is one of this thread's own.
            let message = unsafe { libc::dlerror() };
            if message.is_null() {
                return format!("{} cannot be loaded", name.to_string_lossy());
            }
            // SAFETY: a C string until the next call of the loader by this thread.
            unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned()
        })
    }

    /// Where a function is; the error names it.
    pub(in crate::exec::cuda::device) fn address(
        &self,
        name: &CStr,
    ) -> Result<NonNull<c_void>, String> {
        // SAFETY: the library is open, and the name is a C string.
        let found = unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) };
        NonNull::new(found).ok_or_else(|| format!("there is no {}", name.to_string_lossy()))
    }
}

/// Functions of a library, under their own names, and `load`, which looks all of them up and comes first. Each is given
/// with its signature, as the library's documentation has it.
macro_rules! functions {
    ($($name:ident($($arg:ident: $type:ty),* $(,)?) -> $result:ty;)*) => {
        #[allow(non_snake_case)]
        struct Functions {
            $($name: unsafe extern "C" fn($($type),*) -> $result,)*
        }

        static FUNCTIONS: std::sync::OnceLock<Functions> = std::sync::OnceLock::new();

        /// Finds the functions in the library; the error names one that is missing.
        pub(super) fn load(library: &$crate::exec::cuda::device::library::Library) -> Result<(), String> {
            if FUNCTIONS.get().is_some() {
                return Ok(());
            }
            let address = |name| library.address(name).map(std::ptr::NonNull::as_ptr);
            let functions = Functions {
                $($name: {
                    let name = const {
                        let name = concat!(stringify!($name), "\0").as_bytes();
                        match std::ffi::CStr::from_bytes_with_nul(name) {
                            Ok(name) => name,
                            Err(_) => panic!("a name has no zero in it"),
                        }
                    };
                    let address = address(name)?;
                    // SAFETY: the library's function of this name has this signature.
                    unsafe {
                        std::mem::transmute::<
                            *mut std::ffi::c_void,
                            unsafe extern "C" fn($($type),*) -> $result,
                        >(address)
                    }
                },)*
            };
            // Another thread may have been first: with the same functions.
            let _ = FUNCTIONS.set(functions);
            Ok(())
        }

        $(
            /// The library's function; `load` has succeeded.
            ///
            /// # Safety
            /// As the library's documentation says.
            #[allow(non_snake_case, clippy::too_many_arguments)]
            pub(super) unsafe fn $name($($arg: $type),*) -> $result {
                let functions = FUNCTIONS.get().expect("the library is loaded");
                // SAFETY: the caller sees to it.
                unsafe { (functions.$name)($($arg),*) }
            }
        )*
    };
}

pub(in crate::exec::cuda::device) use functions;

#[cfg(test)]
mod tests {
    use super::*;

    mod loader {
        crate::exec::cuda::device::library::functions! {
            dlsym(library: usize, name: *const std::ffi::c_char) -> usize;
        }
    }

    mod missing {
        crate::exec::cuda::device::library::functions! {
            no_such_function(value: u32) -> u32;
        }
    }

    #[test]
    fn functions_are_found_by_their_names() {
        let library = Library::open(c"libc.so.6").unwrap();
        loader::load(&library).unwrap();
        loader::load(&library).unwrap();
        // SAFETY: null stands for all libraries of the process.
        assert_ne!(unsafe { loader::dlsym(0, c"malloc".as_ptr()) }, 0);
        // SAFETY: the same.
        assert_eq!(unsafe { loader::dlsym(0, c"no_such_function".as_ptr()) }, 0);
    }

    #[test]
    fn what_is_missing_is_named() {
        let library = Library::open(c"libc.so.6").unwrap();
        assert_eq!(missing::load(&library).unwrap_err(), "there is no no_such_function");
        // SAFETY: never called.
        let _unused: unsafe fn(u32) -> u32 = missing::no_such_function;
        let error = Library::open(c"libno_such_library.so.1").err().unwrap();
        assert!(error.contains("libno_such_library.so.1"), "{error}");
    }
}
