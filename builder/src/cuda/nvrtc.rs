//! The library NVRTC, loaded at run time: source text in, machine code out. The only file that calls it.
#![allow(unsafe_code)]

use anyhow::{Context, Result, anyhow, bail, ensure};
use libloading::Library;
use spec_core::exec::SearchPath;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};

/// The library, by the name of its major version.
const LIBRARY: &str = "libnvrtc.so.13";
/// What to say where it was not found.
const REMEDY: &str = "install it with scripts/setup-cuda, or with `pip install nvidia-cuda-nvrtc==13.0.88`, and name \
     its folder by --cuda-lib or SPEC_CUDA_LIB";
/// The library that NVRTC opens by name on its own: it is there already where it was opened by its path.
const BUILTINS: &str = "libnvrtc-builtins.so.13.";
/// The major version whose functions are called and whose code `min_driver` names.
const MAJOR: c_int = 13;
/// Success, of `nvrtcResult`.
const SUCCESS: c_int = 0;

type Handle = *mut c_void;
type Text = *const c_char;

/// The functions used, with the names and signatures of `nvrtc.h`.
struct Api {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> Text,
    create: unsafe extern "C" fn(*mut Handle, Text, Text, c_int, *const Text, *const Text) -> c_int,
    compile: unsafe extern "C" fn(Handle, c_int, *const Text) -> c_int,
    destroy: unsafe extern "C" fn(*mut Handle) -> c_int,
    code_size: unsafe extern "C" fn(Handle, *mut usize) -> c_int,
    code: unsafe extern "C" fn(Handle, *mut c_char) -> c_int,
    ptx_size: unsafe extern "C" fn(Handle, *mut usize) -> c_int,
    ptx: unsafe extern "C" fn(Handle, *mut c_char) -> c_int,
    log_size: unsafe extern "C" fn(Handle, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Handle, *mut c_char) -> c_int,
}

/// The loaded library. Its functions may be called from several threads, each with its own program.
pub(super) struct Nvrtc {
    api: Api,
    version: (c_int, c_int),
    folder: Option<PathBuf>,
    _library: Library,
    _builtins: Option<Library>,
}

/// Texts by name.
pub(super) type Source<'a> = (&'a str, &'a str);

impl Nvrtc {
    /// Finds and loads the library.
    pub(super) fn open(places: &SearchPath) -> Result<Self> {
        let folder = places.folder(LIBRARY).map_err(|missing| anyhow!("{missing}: {REMEDY}"))?;
        let _builtins = match &folder {
            Some(folder) => builtins(folder)?,
            None => None,
        };
        let name = folder.as_ref().map_or(LIBRARY.into(), |folder| folder.join(LIBRARY));
        let _library = load(&name).map_err(|error| match &folder {
            Some(_) => error,
            None => anyhow!("NVRTC, the compiler of the kernels, is missing ({error}): {REMEDY}"),
        })?;
        let api = Api::of(&_library).with_context(|| name.display().to_string())?;
        let mut nvrtc = Self { api, version: (0, 0), folder, _library, _builtins };
        nvrtc.version = nvrtc.read_version()?;
        let (major, minor) = nvrtc.version;
        ensure!(
            major == MAJOR,
            "{}: NVRTC {major}.{minor}, expected {MAJOR}: pip install nvidia-cuda-nvrtc==13.0.88",
            name.display()
        );
        Ok(nvrtc)
    }

    /// Major and minor version.
    pub(super) fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Where it was found, if not by the loader.
    pub(super) fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Compiles `main` with these headers; the error is the compiler's log.
    pub(super) fn compile(
        &self,
        main: Source<'_>,
        headers: &[Source<'_>],
        options: &[String],
    ) -> Result<Vec<u8>> {
        self.compiled(main, headers, options)?.bytes(self.api.code_size, self.api.code)
    }

    /// The text in NVIDIA's assembly language that the code is made of.
    pub(super) fn ptx(
        &self,
        main: Source<'_>,
        headers: &[Source<'_>],
        options: &[String],
    ) -> Result<String> {
        let program = self.compiled(main, headers, options)?;
        let text = program.bytes(self.api.ptx_size, self.api.ptx)?;
        Ok(CStr::from_bytes_until_nul(&text).context("a text without an end")?.to_str()?.into())
    }

    fn compiled(
        &self,
        main: Source<'_>,
        headers: &[Source<'_>],
        options: &[String],
    ) -> Result<Program<'_>> {
        let program = Program::new(&self.api, main, headers)?;
        let options: Vec<CString> =
            options.iter().map(|option| text(option)).collect::<Result<_>>()?;
        let pointers: Vec<Text> = options.iter().map(|option| option.as_ptr()).collect();
        let num_options = c_int::try_from(pointers.len())?;
        // SAFETY: the program lives, and there are that many options, each a C string that lives.
        let status = unsafe { (self.api.compile)(program.handle, num_options, pointers.as_ptr()) };
        if status != SUCCESS {
            let log = program.bytes(self.api.log_size, self.api.log)?;
            let log = String::from_utf8_lossy(&log);
            bail!("{}", log.trim_matches(['\0', '\n', ' ']));
        }
        Ok(program)
    }

    fn read_version(&self) -> Result<(c_int, c_int)> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both point to integers that outlive the call.
        self.api.check(unsafe { (self.api.version)(&mut major, &mut minor) })?;
        Ok((major, minor))
    }
}

impl Api {
    fn of(library: &Library) -> Result<Self> {
        /// The address of a function.
        fn symbol<T: Copy>(library: &Library, name: &CStr) -> Result<T> {
            // SAFETY: every type below is the one that `nvrtc.h` of version 13 declares for the name; the pointers
            // are kept beside the library and not used after it.
            let symbol = unsafe { library.get::<T>(name.to_bytes_with_nul()) };
            Ok(*symbol?)
        }
        Ok(Self {
            version: symbol(library, c"nvrtcVersion")?,
            error_string: symbol(library, c"nvrtcGetErrorString")?,
            create: symbol(library, c"nvrtcCreateProgram")?,
            compile: symbol(library, c"nvrtcCompileProgram")?,
            destroy: symbol(library, c"nvrtcDestroyProgram")?,
            code_size: symbol(library, c"nvrtcGetCUBINSize")?,
            code: symbol(library, c"nvrtcGetCUBIN")?,
            ptx_size: symbol(library, c"nvrtcGetPTXSize")?,
            ptx: symbol(library, c"nvrtcGetPTX")?,
            log_size: symbol(library, c"nvrtcGetProgramLogSize")?,
            log: symbol(library, c"nvrtcGetProgramLog")?,
        })
    }

    fn check(&self, status: c_int) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: for every number the function gives a static text.
        let text = unsafe { CStr::from_ptr((self.error_string)(status)) };
        bail!("NVRTC: {}", text.to_string_lossy())
    }
}

struct Program<'a> {
    api: &'a Api,
    handle: Handle,
}

impl<'a> Program<'a> {
    fn new(api: &'a Api, main: Source<'_>, headers: &[Source<'_>]) -> Result<Self> {
        let (name, source) = (text(main.0)?, text(main.1)?);
        let texts = |part: fn(&Source<'_>) -> Result<CString>| -> Result<Vec<CString>> {
            headers.iter().map(part).collect()
        };
        let (names, sources) = (texts(|header| text(header.0))?, texts(|header| text(header.1))?);
        let pointers = |texts: &[CString]| texts.iter().map(|t| t.as_ptr()).collect::<Vec<Text>>();
        let (header_names, header_sources) = (pointers(&names), pointers(&sources));
        let mut handle = std::ptr::null_mut();
        // SAFETY: all texts are C strings that outlive the call, which copies them; there are as many names as
        // headers.
        api.check(unsafe {
            (api.create)(
                &mut handle,
                source.as_ptr(),
                name.as_ptr(),
                c_int::try_from(headers.len())?,
                header_sources.as_ptr(),
                header_names.as_ptr(),
            )
        })?;
        Ok(Self { api, handle })
    }

    /// What one function measures and the other copies.
    fn bytes(
        &self,
        size: unsafe extern "C" fn(Handle, *mut usize) -> c_int,
        copy: unsafe extern "C" fn(Handle, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>> {
        let mut len = 0;
        // SAFETY: the program lives, and the length is written to an integer that does.
        self.api.check(unsafe { size(self.handle, &mut len) })?;
        let mut bytes = vec![0_u8; len];
        // SAFETY: the buffer has the length that was asked for.
        self.api.check(unsafe { copy(self.handle, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle came from `create` and is destroyed once.
        unsafe { (self.api.destroy)(&mut self.handle) };
    }
}

fn text(text: &str) -> Result<CString> {
    CString::new(text).context("a source with a zero byte")
}

fn load(name: &Path) -> Result<Library> {
    // SAFETY: NVRTC and its builtins do nothing when they are loaded but set up their own data.
    Ok(unsafe { Library::new(name) }?)
}

/// Loads the builtins that lie beside the library, if they do.
fn builtins(folder: &Path) -> Result<Option<Library>> {
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let names = entries.flatten().map(|entry| entry.file_name());
    // A toolkit has links of several lengths; the loader knows the library by its soname, of minor version.
    let builtins = names
        .filter_map(|name| name.into_string().ok())
        .filter(|name| name.strip_prefix(BUILTINS).is_some_and(|rest| !rest.contains('.')))
        .min();
    builtins.map(|name| load(&folder.join(name))).transpose()
}
