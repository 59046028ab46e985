//! Streams, events and graphs.

use std::ffi::{c_uint, c_ulonglong};

use super::{expect_flags, put};
use crate::context::Event;
use crate::fault::Status;
use crate::machine::in_context;
use crate::stream::Stream;
use crate::table::Handle;

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u64 = 1;
/// `CU_EVENT_DISABLE_TIMING`, alone and with `CU_EVENT_BLOCKING_SYNC`. Times would mean nothing.
const WITHOUT_TIME: [u64; 2] = [2, 3];
/// The modes of `CUstreamCaptureMode`, of which the first one binds all threads.
const CAPTURE_MODES: [u64; 3] = [0, 1, 2];

/// # Safety
/// As the driver's; so below.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: *mut Handle, flags: c_uint) -> Status {
    in_context("cuStreamCreate", |context, _| {
        expect_flags(flags.into(), &[0, NON_BLOCKING])?;
        let is_blocking = u64::from(flags) != NON_BLOCKING;
        let made = context.streams.put(Stream::new(is_blocking));
        // SAFETY: the caller's pointer, as the interface asks; so in all that follow.
        unsafe { put(stream, made) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: Handle) -> Status {
    in_context("cuStreamDestroy", |context, config| {
        context.not_in_capture("destroying a stream")?;
        context.wait(stream, u64::MAX, &mut config.failing)?;
        context.streams.remove(stream).map(drop)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: Handle) -> Status {
    in_context("cuStreamSynchronize", |context, config| {
        context.not_in_capture("waiting")?;
        context.wait(stream, u64::MAX, &mut config.failing)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamBeginCapture_v2(stream: Handle, mode: c_uint) -> Status {
    in_context("cuStreamBeginCapture", |context, _| {
        expect_flags(mode.into(), &CAPTURE_MODES)?;
        context.streams.get_mut(stream)?.begin(u64::from(mode) == CAPTURE_MODES[0])
    })
}

/// Leaves no graph where the recording was spoilt.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamEndCapture(stream: Handle, graph: *mut Handle) -> Status {
    in_context("cuStreamEndCapture", |context, _| {
        // SAFETY: as above.
        unsafe { put(graph, 0) }?;
        let works = context.streams.get_mut(stream)?.end()?;
        // SAFETY: as above.
        unsafe { put(graph, context.graphs.put(works)) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphInstantiateWithFlags(
    exec: *mut Handle,
    graph: Handle,
    flags: c_ulonglong,
) -> Status {
    in_context("cuGraphInstantiateWithFlags", |context, _| {
        expect_flags(flags, &[0])?;
        let works = context.graphs.get(graph)?.clone();
        // SAFETY: as above.
        unsafe { put(exec, context.execs.put(works)) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphDestroy(graph: Handle) -> Status {
    in_context("cuGraphDestroy", |context, _| context.graphs.remove(graph).map(drop))
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphExecDestroy(exec: Handle) -> Status {
    in_context("cuGraphExecDestroy", |context, _| context.execs.remove(exec).map(drop))
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphLaunch(exec: Handle, stream: Handle) -> Status {
    in_context("cuGraphLaunch", |context, _| context.replay(exec, stream))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: *mut Handle, flags: c_uint) -> Status {
    in_context("cuEventCreate", |context, _| {
        expect_flags(flags.into(), &WITHOUT_TIME)?;
        // SAFETY: as above.
        unsafe { put(event, context.events.put(Event::default())) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: Handle) -> Status {
    in_context("cuEventDestroy", |context, _| context.events.remove(event).map(drop))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: Handle, stream: Handle) -> Status {
    in_context("cuEventRecord", |context, _| context.record(event, stream))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: Handle) -> Status {
    in_context("cuEventSynchronize", |context, config| match context.recorded(event)? {
        Some((stream, num)) => context.wait(stream, num, &mut config.failing),
        None => Ok(()),
    })
}
