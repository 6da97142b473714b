#pragma once

/// A moment with a name ("agent.after_unpack_before_staged") at which a test makes the process die,
/// stand still or wait. Compiled in by -DWEIGHTWIRE_FAILPOINTS=ON only: without it the macro is
/// nothing, and no name is in the binary. docs/failpoints.md lists all of them.
///
/// A process is armed by the file that its environment's WEIGHTWIRE_FAILPOINT names. It holds one
/// line and must appear by a rename, so that nobody reads half of it:
///
///   <point> kill|stop|delay <crossings that pass first> <milliseconds of the delay>
///
///   kill   SIGKILL to the process
///   stop   SIGSTOP to the process: whoever armed it sends SIGCONT
///   delay  the crossing thread sleeps, and whatever waits for it waits
///
/// The crossing that acts first renames the file to "<path>.crossed": it acts once, however many
/// threads cross it and however often the process is started again, and whoever armed it can see
/// that the moment came. A file that is not understood aborts the process: a test that arms nothing
/// by mistake must not pass. Thread-safe; without the variable a crossing costs one comparison.
#if defined(WEIGHTWIRE_FAILPOINTS)

namespace weightwire {
void CrossFailpoint(const char* point);
}  // namespace weightwire

#define WW_FAILPOINT(point) ::weightwire::CrossFailpoint(point)

#else

#define WW_FAILPOINT(point) static_cast<void>(0)

#endif
