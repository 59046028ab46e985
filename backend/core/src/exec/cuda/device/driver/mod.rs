//! A GPU through the CUDA driver, whose library is looked up when a device is opened, so that one build serves machines
//! with and without a GPU. Of cudarc, types alone are used.
#![allow(unsafe_code)]

mod calls;
mod context;
mod describe;
mod operation;
mod pinned;
mod staging;

pub use calls::is_present;

use super::cublas::Cublas;
use super::search_path::SearchPath;
use super::{
    Address, Description, Device, Fill, Graph, Held, Kernel, Mark, Op, PRODUCT_BYTES, ProductShape,
    Shared,
};
use crate::{Error, Result};
use calls::{Status, check};
use context::Context;
use cudarc::driver::sys;
use describe::describe;
use pinned::Pinned;
use staging::Staging;
use std::cell::OnceCell;
use std::ffi::CString;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// Alignment that `cuMemAlloc` guarantees.
const ALIGNMENT: usize = 256;

/// An opened GPU with one stream. Everything that was allocated or loaded goes with it.
pub struct Driver {
    description: Description,
    /// Whether kernels may start before the ones ahead of them have ended.
    overlaps: bool,
    /// What was said already: that kernels of graphs cannot overlap, that no graph can be made.
    said: [bool; 2],
    context: Arc<Context>,
    stream: sys::CUstream,
    memory: Vec<sys::CUdeviceptr>,
    shared: Vec<Shared>,
    modules: Vec<sys::CUmodule>,
    functions: Vec<sys::CUfunction>,
    graphs: Vec<Recorded>,
    events: Vec<sys::CUevent>,
    held: Held,
    staging: Option<Staging>,
    products: Option<Cublas>,
    /// The status after which no work is taken any more.
    last: OnceCell<Status>,
}

/// What is replayed.
struct Recorded {
    /// None where no graph could be made, or launched.
    exec: Option<sys::CUgraphExec>,
    ops: Vec<Op>,
}

// SAFETY: handles of the driver may be used from any thread; every method makes the context current first.
unsafe impl Send for Driver {}

impl Driver {
    /// Opens the GPU with this number, counted from 0.
    pub fn open(ordinal: usize) -> Result<Self> {
        calls::open()?;
        let ordinal =
            i32::try_from(ordinal).map_err(|_| Error::Device(format!("no GPU {ordinal}")))?;
        // SAFETY: each call gets pointers to live locals of the types that it writes.
        unsafe {
            check("cuInit", calls::cuInit(0))?;
            let mut count = 0;
            check("cuDeviceGetCount", calls::cuDeviceGetCount(&mut count))?;
            if ordinal >= count {
                return Err(Error::Device(format!(
                    "GPU {ordinal} was asked for, {count} are here"
                )));
            }
            let mut device = 0;
            check("cuDeviceGet", calls::cuDeviceGet(&mut device, ordinal))?;
            let description = describe(device)?;
            let context = Arc::new(Context::retain(device)?);
            // Older GPUs have no such thing: there, kernels do not wait by themselves.
            let overlaps = description.capability >= (9, 0) && overlap_is_wanted()?;
            let mut driver = Self {
                description,
                overlaps,
                said: [false; 2],
                context,
                stream: ptr::null_mut(),
                memory: Vec::new(),
                shared: Vec::new(),
                modules: Vec::new(),
                functions: Vec::new(),
                graphs: Vec::new(),
                events: Vec::new(),
                held: Held::default(),
                staging: None,
                products: None,
                last: OnceCell::new(),
            };
            driver.enter()?;
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            let created = calls::cuStreamCreate(&mut driver.stream, flags);
            // Where others have the GPU still, its failure is theirs too.
            driver.check("cuStreamCreate", created)?;
            Ok(driver)
        }
    }

    /// Makes this GPU the current one of the calling thread; refuses once it takes no more work.
    fn enter(&self) -> Result<()> {
        if let Some(&status) = self.last.get() {
            let name = calls::name_of(status);
            let message = format!("the GPU failed before ({name}): restart the server");
            return Err(Error::Device(message));
        }
        self.check("cuCtxSetCurrent", self.context.make_current())
    }

    /// As the other `check`; what ends all work is remembered, and told with what to do.
    fn check(&self, what: &str, status: Status) -> Result<()> {
        if !calls::is_last(status) {
            return check(what, status);
        }
        self.last.get_or_init(|| status);
        Err(Error::Device(format!(
            "{what}: {}: the GPU takes no more work: restart the server, or, where nothing else uses the GPU, unload \
             every model on it and load them again",
            calls::name_of(status)
        )))
    }

    /// Says once what an error leads to: graphs are alike, and there are many.
    fn say(&mut self, which: usize, error: &Error, what: &str) {
        if !std::mem::replace(&mut self.said[which], true) {
            eprintln!("{error}: {what}, which is slower");
        }
    }

    /// Says that no graph is launched.
    fn say_alone(&mut self, error: &Error) {
        self.say(1, error, "a step's operations are issued one by one");
    }

    /// Makes a graph of operations. The stream is as before also where that fails.
    fn capture(&self, ops: &[Op], may_overlap: bool) -> Result<sys::CUgraphExec> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let (mut graph, mut exec) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: capture begins and ends here on our own stream, also after a failed launch; what there is of a graph
        // is destroyed once.
        unsafe {
            let begun = calls::cuStreamBeginCapture_v2(self.stream, mode);
            self.check("cuStreamBeginCapture", begun)?;
            let issued = ops.iter().try_for_each(|op| self.put(op, may_overlap));
            let ended = calls::cuStreamEndCapture(self.stream, &mut graph);
            let recorded = issued.and_then(|()| self.check("cuStreamEndCapture", ended));
            let made = recorded.and_then(|()| {
                let made = calls::cuGraphInstantiateWithFlags(&mut exec, graph, 0);
                self.check("cuGraphInstantiate", made)
            });
            if !graph.is_null() {
                calls::cuGraphDestroy(graph);
            }
            made.map(|()| exec)
        }
    }

    /// Page-locked memory, for as long as somebody has it.
    fn pinned(&mut self, bytes: usize) -> Result<Pinned> {
        self.enter()?;
        let memory = Pinned::alloc(bytes, self)?;
        self.held.pinned += bytes;
        Ok(memory)
    }

    /// Copies so many bytes to the device when its turn comes. The words are page-locked memory that this has until drop.
    fn copy(&self, to: Address, from: &[AtomicU32], bytes: usize) -> Result<()> {
        assert!(bytes <= size_of_val(from), "{bytes} bytes of {}", size_of_val(from));
        self.enter()?;
        // SAFETY: the memory lives until nothing runs any more, by the above; who changes it earlier has the device see
        // either value. The driver checks the target range.
        let status =
            unsafe { calls::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), bytes, self.stream) };
        self.check("cuMemcpyHtoDAsync", status)
    }

    /// # Safety
    /// The context is current, nothing runs, and nothing of this is used again.
    unsafe fn free(&self) {
        // SAFETY: by the above, each handle is released once.
        unsafe {
            let execs = self.graphs.iter().filter_map(|recorded| recorded.exec);
            execs.for_each(|exec| _ = calls::cuGraphExecDestroy(exec));
            self.events.iter().for_each(|&event| _ = calls::cuEventDestroy_v2(event));
            self.modules.iter().for_each(|&module| _ = calls::cuModuleUnload(module));
            self.memory.iter().for_each(|&address| _ = calls::cuMemFree_v2(address));
            if !self.stream.is_null() {
                calls::cuStreamDestroy_v2(self.stream);
            }
        }
    }
}

impl Device for Driver {
    fn describe(&self) -> &Description {
        &self.description
    }

    fn available_bytes(&self) -> Result<usize> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: pointers to locals.
        self.check("cuMemGetInfo", unsafe { calls::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok(free)
    }

    fn held(&self) -> Held {
        self.held
    }

    /// All devices of a number are in its primary context.
    fn shares_memory(&self) -> bool {
        true
    }

    fn alloc(&mut self, bytes: usize) -> Result<Address> {
        self.enter()?;
        let bytes = bytes.max(1).next_multiple_of(ALIGNMENT);
        let mut address = 0;
        // SAFETY: a pointer to a local; the memory is freed once, at drop.
        let status = unsafe { calls::cuMemAlloc_v2(&mut address, bytes) };
        if status == calls::OUT_OF_MEMORY {
            let left = self.available_bytes()? >> 20;
            let name = &self.description.name;
            return Err(Error::Capacity(format!(
                "{name}: {} MiB of GPU memory are needed, {left} MiB are left",
                bytes >> 20
            )));
        }
        self.check("cuMemAlloc", status)?;
        self.memory.push(address);
        self.held.device += bytes;
        // SAFETY: the range was just allocated.
        self.check("cuMemsetD8Async", unsafe {
            calls::cuMemsetD8Async(address, 0, bytes, self.stream)
        })?;
        Ok(address)
    }

    fn alloc_shared(&mut self, bytes: usize) -> Result<Shared> {
        self.enter()?;
        let len = bytes.max(1).next_multiple_of(ALIGNMENT);
        let memory = self.pinned(len)?;
        let address = memory.address(self)?;
        let shared = Shared::new(Arc::new(memory), address);
        self.shared.push(shared.clone());
        Ok(shared)
    }

    fn write(&mut self, to: Address, bytes: &[u8]) -> Result<()> {
        self.write_with(to, bytes.len(), &mut |offset, piece| {
            piece.copy_from_slice(&bytes[offset..][..piece.len()]);
            Ok(())
        })
    }

    fn write_with(&mut self, to: Address, bytes: usize, fill: &mut Fill<'_>) -> Result<()> {
        self.stage(to, bytes, fill)
    }

    fn write_shared(&mut self, to: Address, shared: &Shared, from: Range<usize>) -> Result<()> {
        assert!(self.shared.iter().any(|own| own.is(shared)), "memory of another device");
        let bytes = from.len();
        self.copy(to, shared.words(from), bytes)
    }

    fn read(&mut self, from: Address, out: &mut [u8]) -> Result<()> {
        self.wait()?;
        // SAFETY: the target is a slice; the driver checks the source range.
        let status = unsafe { calls::cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), from, out.len()) };
        self.check("cuMemcpyDtoH", status)
    }

    fn load(
        &mut self,
        variant: &str,
        entry: &str,
        code: &[u8],
        shared_bytes: u32,
    ) -> Result<Kernel> {
        self.enter()?;
        let of = |what| format!("{what} of {variant}");
        let entry =
            CString::new(entry).map_err(|_| Error::Device(format!("kernel name {entry:?}")))?;
        let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
        let limit = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: `code` is a whole cubin of a checked engine section; the others are locals.
        unsafe {
            self.check(
                &of("cuModuleLoadData"),
                calls::cuModuleLoadData(&mut module, code.as_ptr().cast()),
            )?;
            self.modules.push(module);
            let status = calls::cuModuleGetFunction(&mut function, module, entry.as_ptr());
            self.check(&of("cuModuleGetFunction"), status)?;
            // All kernels ask for the same split of the memory: to change it, a multiprocessor must run empty.
            let split =
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
            for (attribute, value) in [(limit, shared_bytes as i32), (split, 100)] {
                let status = calls::cuFuncSetAttribute(function, attribute, value);
                self.check(&of("cuFuncSetAttribute"), status)?;
            }
        }
        self.functions.push(function);
        Ok(Kernel(self.functions.len() as u32 - 1))
    }

    fn issue(&mut self, op: &Op) -> Result<()> {
        self.enter()?;
        self.put(op, true)
    }

    fn enable_products(&mut self, shapes: &[ProductShape]) -> Result<()> {
        self.enter()?;
        if self.products.is_none() {
            let mut products = Cublas::open(&SearchPath::of_process(None))?;
            products.work_in(self.alloc(PRODUCT_BYTES)?);
            self.products = Some(products);
        }
        let products = self.products.as_mut().expect("they are there by now");
        shapes.iter().try_for_each(|shape| products.enable(shape))
    }

    /// Where no graph can be made, replaying issues each operation by itself.
    fn record(&mut self, ops: &[Op]) -> Result<Graph> {
        self.enter()?;
        let graph = match self.capture(ops, true) {
            // Seen elsewhere on some systems: kernels that overlap cannot be captured.
            Err(error) if self.overlaps && self.last.get().is_none() => {
                let apart = self.capture(ops, false);
                if apart.is_ok() {
                    self.say(0, &error, "kernels of a graph begin one after the other");
                }
                apart
            }
            other => other,
        };
        let exec = match graph {
            Ok(exec) => Some(exec),
            Err(error) if self.last.get().is_some() => return Err(error),
            Err(error) => {
                self.say_alone(&error);
                None
            }
        };
        self.graphs.push(Recorded { exec, ops: ops.to_vec() });
        Ok(Graph(self.graphs.len() as u32 - 1))
    }

    fn replay(&mut self, graph: Graph) -> Result<()> {
        self.enter()?;
        let idx = graph.0 as usize;
        if let Some(exec) = self.graphs[idx].exec {
            // SAFETY: what is here was not destroyed.
            let status = unsafe { calls::cuGraphLaunch(exec, self.stream) };
            let launched = self.check("cuGraphLaunch", status);
            let Err(error) = launched else { return Ok(()) };
            // The first launch takes memory.
            if status != calls::OUT_OF_MEMORY {
                return Err(error);
            }
            self.graphs[idx].exec = None;
            // SAFETY: it is gone from where it would be destroyed once more.
            unsafe { calls::cuGraphExecDestroy(exec) };
            self.say_alone(&error);
        }
        self.graphs[idx].ops.iter().try_for_each(|op| self.put(op, true))
    }

    fn new_mark(&mut self) -> Result<Mark> {
        self.enter()?;
        let mut event = ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: a pointer to a local; the event is destroyed once, at drop.
        self.check("cuEventCreate", unsafe { calls::cuEventCreate(&mut event, flags) })?;
        self.events.push(event);
        Ok(Mark(self.events.len() as u32 - 1))
    }

    fn put_mark(&mut self, mark: Mark) -> Result<()> {
        self.enter()?;
        let event = self.events[mark.0 as usize];
        // SAFETY: events and the stream live until drop.
        self.check("cuEventRecord", unsafe { calls::cuEventRecord(event, self.stream) })
    }

    fn wait_for(&mut self, mark: Mark) -> Result<()> {
        self.enter()?;
        // SAFETY: events live until drop.
        let status = unsafe { calls::cuEventSynchronize(self.events[mark.0 as usize]) };
        self.check("cuEventSynchronize", status)
    }

    fn wait(&mut self) -> Result<()> {
        self.enter()?;
        // SAFETY: the stream lives until drop.
        self.check("cuStreamSynchronize", unsafe { calls::cuStreamSynchronize(self.stream) })
    }
}

impl Drop for Driver {
    /// Errors are of no use to anyone here. After the last status every call fails: what the context holds then goes
    /// with it, once nobody else has it.
    fn drop(&mut self) {
        let _ = self.wait();
        self.products = None;
        if self.enter().is_ok() {
            // SAFETY: nothing runs on the stream any more; this is the last use.
            unsafe { self.free() };
        }
    }
}

/// To see whether something that goes wrong goes wrong because kernels overlap.
fn overlap_is_wanted() -> Result<bool> {
    match std::env::var("SPEC_CUDA_OVERLAP").as_deref() {
        Err(_) | Ok("on") => Ok(true),
        Ok("off") => Ok(false),
        Ok(other) => {
            Err(Error::Device(format!("SPEC_CUDA_OVERLAP is '{other}', on and off are known")))
        }
    }
}
