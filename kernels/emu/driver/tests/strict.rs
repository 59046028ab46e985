//! What the emulated driver refuses, and what it lets wait: called as a program calls it, by name.
#![allow(clippy::unwrap_used, unsafe_code, non_snake_case)]

use std::ffi::{CString, c_int, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

type Status = u32;
type Handle = u64;

const SUCCESS: Status = 0;
const INVALID_VALUE: Status = 1;
const INVALID_CONTEXT: Status = 201;
const INVALID_HANDLE: Status = 400;
const ILLEGAL_STATE: Status = 401;
const CAPTURE_UNSUPPORTED: Status = 900;
const CAPTURE_INVALIDATED: Status = 901;

const NON_BLOCKING: u32 = 1;

/// The functions by their names, each with its signature.
macro_rules! functions {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => {
        $(
            fn $name($($arg: $type),*) -> Status {
                let address = address(concat!(stringify!($name), "\0"));
                // SAFETY: the function of this name has this signature; pointers are the caller's locals.
                unsafe {
                    let found: unsafe extern "C" fn($($type),*) -> Status = std::mem::transmute(address);
                    found($($arg),*)
                }
            }
        )*
    };
}

functions! {
    cuInit(flags: u32);
    cuDevicePrimaryCtxRetain(context: &mut Handle, device: c_int);
    cuDevicePrimaryCtxRelease_v2(device: c_int);
    cuCtxSetCurrent(context: Handle);
    cuMemAlloc_v2(address: &mut u64, bytes: usize);
    cuMemFree_v2(address: u64);
    cuMemHostAlloc(host: &mut u64, bytes: usize, flags: u32);
    cuMemFreeHost(host: u64);
    cuMemsetD8Async(to: u64, value: u8, bytes: usize, stream: Handle);
    cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle);
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle);
    cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize);
    cuStreamCreate(stream: &mut Handle, flags: u32);
    cuStreamDestroy_v2(stream: Handle);
    cuStreamSynchronize(stream: Handle);
    cuStreamBeginCapture_v2(stream: Handle, mode: u32);
    cuStreamEndCapture(stream: Handle, graph: &mut Handle);
    cuGraphInstantiateWithFlags(exec: &mut Handle, graph: Handle, flags: u64);
    cuGraphLaunch(exec: Handle, stream: Handle);
    cuGraphDestroy(graph: Handle);
    cuGraphExecDestroy(exec: Handle);
    cuEventCreate(event: &mut Handle, flags: u32);
    cuEventRecord(event: Handle, stream: Handle);
    cuEventSynchronize(event: Handle);
    cuEventDestroy_v2(event: Handle);
}

fn address(name: &str) -> *mut c_void {
    let path = std::env::current_exe().unwrap().with_file_name("libspec_emu_driver.so");
    let path = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: both are C strings; the library stays loaded.
    unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
        assert!(!library.is_null(), "{path:?} is not built");
        let found = libc::dlsym(library, name.as_ptr().cast());
        assert!(!found.is_null(), "{name}");
        found
    }
}

/// The two devices, for one test at a time; the thread works on the first.
struct Turn {
    contexts: [Handle; 2],
    _turn: MutexGuard<'static, ()>,
}

impl Turn {
    fn take() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: whoever reads variables of this process has the turn.
        unsafe { std::env::set_var("EMU_DRIVER_DEVICES", "2") };
        assert_eq!(cuInit(0), SUCCESS);
        let mut contexts = [0; 2];
        for (device, context) in contexts.iter_mut().enumerate() {
            assert_eq!(cuDevicePrimaryCtxRetain(context, device as c_int), SUCCESS);
        }
        assert_eq!(cuCtxSetCurrent(contexts[0]), SUCCESS);
        Self { contexts, _turn: turn }
    }

    /// Lets both go; the statuses.
    fn give(self) -> [Status; 2] {
        [0, 1].map(cuDevicePrimaryCtxRelease_v2)
    }
}

fn stream() -> Handle {
    let mut stream = 0;
    assert_eq!(cuStreamCreate(&mut stream, NON_BLOCKING), SUCCESS);
    stream
}

fn memory(bytes: usize) -> u64 {
    let mut address = 0;
    assert_eq!(cuMemAlloc_v2(&mut address, bytes), SUCCESS);
    address
}

fn read(from: u64) -> u8 {
    let mut value = 0u8;
    assert_eq!(cuMemcpyDtoH_v2((&raw mut value).cast(), from, 1), SUCCESS);
    value
}

#[test]
fn what_is_held_at_the_end_is_refused_once() {
    let turn = Turn::take();
    memory(1);
    assert_eq!(turn.give(), [ILLEGAL_STATE, SUCCESS]);
    let turn = Turn::take();
    assert_eq!(cuStreamDestroy_v2(stream()), SUCCESS);
    assert_eq!(turn.give(), [SUCCESS; 2]);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(0), INVALID_CONTEXT);
}

#[test]
fn handles_are_of_their_own_context_until_they_are_destroyed() {
    let turn = Turn::take();
    let stream = stream();
    assert_eq!(cuCtxSetCurrent(turn.contexts[1]), SUCCESS);
    assert_eq!(cuStreamSynchronize(stream), INVALID_HANDLE);
    assert_eq!(cuCtxSetCurrent(turn.contexts[0]), SUCCESS);
    assert_eq!(cuStreamSynchronize(stream), SUCCESS);
    assert_eq!(cuStreamDestroy_v2(stream), SUCCESS);
    assert_eq!(cuStreamSynchronize(stream), INVALID_HANDLE);
    assert_eq!(cuStreamSynchronize(stream + 1), INVALID_HANDLE);
    assert_eq!(cuCtxSetCurrent(0), SUCCESS);
    assert_eq!(cuStreamSynchronize(stream), INVALID_CONTEXT);
    let context = turn.contexts[0];
    assert_eq!(turn.give(), [SUCCESS; 2]);
    assert_eq!(cuCtxSetCurrent(context), INVALID_CONTEXT);
}

#[test]
fn memory_is_freed_once_and_touched_inside_of_allocations_only() {
    let turn = Turn::take();
    let (stream, address, mut host) = (stream(), memory(8), 0);
    assert_eq!(cuMemHostAlloc(&mut host, 8, 0), SUCCESS);
    assert_eq!(cuMemsetD8Async(address + 1, 0, 8, stream), INVALID_VALUE);
    assert_eq!(cuMemcpyHtoDAsync_v2(address + 8, host, 1, stream), INVALID_VALUE);
    assert_eq!(cuMemcpyHtoDAsync_v2(address, host + 1, 8, stream), INVALID_VALUE);
    assert_eq!(cuMemcpyHtoDAsync_v2(address, address, 8, stream), INVALID_VALUE);
    assert_eq!(cuMemcpyDtoDAsync_v2(address + 4, address, 5, stream), INVALID_VALUE);
    assert_eq!(cuMemcpyDtoDAsync_v2(address, address + 4, 5, stream), INVALID_VALUE);
    assert_eq!(cuMemcpyDtoH_v2(ptr::null_mut(), address - 1, 1), INVALID_VALUE);
    assert_eq!(cuMemFree_v2(host), INVALID_VALUE);
    assert_eq!(cuMemFreeHost(address), INVALID_VALUE);
    assert_eq!((cuMemFree_v2(address), cuMemFree_v2(address)), (SUCCESS, INVALID_VALUE));
    assert_eq!((cuMemFreeHost(host), cuMemFreeHost(host)), (SUCCESS, INVALID_VALUE));
    assert_eq!(cuStreamDestroy_v2(stream), SUCCESS);
    assert_eq!(turn.give(), [SUCCESS; 2]);
}

#[test]
fn work_waits_until_it_is_waited_for() {
    let turn = Turn::take();
    let (stream, address, mut host, mut event) = (stream(), memory(1), 0, 0);
    assert_eq!(cuMemHostAlloc(&mut host, 1, 0), SUCCESS);
    assert_eq!(cuEventCreate(&mut event, 2), SUCCESS);
    let write = |value: u8| {
        // SAFETY: one byte that the test owns.
        unsafe { ptr::with_exposed_provenance_mut::<u8>(host as usize).write(value) };
    };
    write(1);
    assert_eq!(cuMemsetD8Async(address, 7, 1, stream), SUCCESS);
    assert_eq!(cuEventRecord(event, stream), SUCCESS);
    assert_eq!(cuMemcpyHtoDAsync_v2(address, host, 1, stream), SUCCESS);
    assert_ne!(read(address), 7);
    assert_eq!(cuEventSynchronize(event), SUCCESS);
    assert_eq!(read(address), 7);
    // Pinned memory is read when the copy's turn has come.
    write(2);
    assert_eq!(cuStreamSynchronize(stream), SUCCESS);
    assert_eq!(read(address), 2);
    assert_eq!(cuEventDestroy_v2(event), SUCCESS);
    assert_eq!(cuMemFreeHost(host), SUCCESS);
    assert_eq!(cuMemFree_v2(address), SUCCESS);
    assert_eq!(cuStreamDestroy_v2(stream), SUCCESS);
    assert_eq!(turn.give(), [SUCCESS; 2]);
}

#[test]
fn a_recording_has_no_waiting_and_no_allocation_in_it() {
    let turn = Turn::take();
    let (stream, address, mut graph) = (stream(), memory(1), 0);
    let (pageable, place) = ([1u8], std::cell::RefCell::new(0u8));
    let forbidden: [&dyn Fn() -> Status; 4] = [
        &|| cuStreamSynchronize(stream),
        &|| cuMemAlloc_v2(&mut 0, 1),
        &|| cuMemcpyDtoH_v2((&raw mut *place.borrow_mut()).cast(), address, 1),
        &|| cuMemcpyHtoDAsync_v2(address, pageable.as_ptr() as u64, 1, stream),
    ];
    for call in forbidden {
        assert_eq!(cuStreamBeginCapture_v2(stream, 2), SUCCESS);
        assert_eq!(call(), CAPTURE_UNSUPPORTED);
        assert_eq!(cuStreamEndCapture(stream, &mut graph), CAPTURE_INVALIDATED);
        assert_eq!((graph, call()), (0, SUCCESS), "the stream is as before");
    }
    assert_eq!(cuStreamEndCapture(stream, &mut graph), ILLEGAL_STATE);
    assert_eq!(cuStreamDestroy_v2(stream), SUCCESS);
    assert_eq!(cuMemFree_v2(address), SUCCESS);
    // One allocation was let through in between.
    assert_eq!(turn.give(), [ILLEGAL_STATE, SUCCESS]);
}

#[test]
fn a_recording_binds_who_makes_it_and_others_where_it_says_so() {
    let turn = Turn::take();
    let (stream, mut graph) = (stream(), 0);
    let elsewhere = || {
        let allocate = || {
            assert_eq!(cuCtxSetCurrent(turn.contexts[0]), SUCCESS);
            let mut address = 0;
            let allocated = cuMemAlloc_v2(&mut address, 1);
            (allocated, if allocated == SUCCESS { cuMemFree_v2(address) } else { SUCCESS })
        };
        std::thread::scope(|scope| scope.spawn(allocate).join().unwrap())
    };
    // Another model is loaded beside one that records its steps.
    assert_eq!(cuStreamBeginCapture_v2(stream, 2), SUCCESS);
    assert_eq!(elsewhere(), (SUCCESS, SUCCESS));
    assert_eq!(cuStreamEndCapture(stream, &mut graph), SUCCESS);
    assert_eq!(cuGraphDestroy(graph), SUCCESS);
    assert_eq!(cuStreamBeginCapture_v2(stream, 0), SUCCESS);
    assert_eq!(elsewhere().0, CAPTURE_UNSUPPORTED);
    assert_eq!(cuStreamEndCapture(stream, &mut graph), CAPTURE_INVALIDATED);
    assert_eq!(cuStreamDestroy_v2(stream), SUCCESS);
    assert_eq!(turn.give(), [SUCCESS; 2]);
}

#[test]
fn a_graph_runs_as_often_as_it_is_launched() {
    let turn = Turn::take();
    let (stream, address, mut graph, mut exec) = (stream(), memory(1), 0, 0);
    assert_eq!(cuMemsetD8Async(address, 0, 1, stream), SUCCESS);
    assert_eq!(cuStreamBeginCapture_v2(stream, 2), SUCCESS);
    assert_eq!(cuMemsetD8Async(address, 9, 1, stream), SUCCESS);
    assert_eq!(cuStreamEndCapture(stream, &mut graph), SUCCESS);
    assert_eq!(cuGraphInstantiateWithFlags(&mut exec, graph, 0), SUCCESS);
    assert_eq!(cuGraphDestroy(graph), SUCCESS);
    assert_eq!(cuStreamSynchronize(stream), SUCCESS);
    assert_eq!(read(address), 0);
    for _ in 0..2 {
        assert_eq!(cuGraphLaunch(exec, stream), SUCCESS);
        assert_eq!(cuStreamSynchronize(stream), SUCCESS);
        assert_eq!(read(address), 9);
    }
    assert_eq!(cuGraphExecDestroy(exec), SUCCESS);
    assert_eq!(cuGraphLaunch(exec, stream), INVALID_HANDLE);
    assert_eq!(cuMemFree_v2(address), SUCCESS);
    assert_eq!(cuStreamDestroy_v2(stream), SUCCESS);
    assert_eq!(turn.give(), [SUCCESS; 2]);
}
