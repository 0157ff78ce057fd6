//! What the assembler says of each kernel: registers, shared memory, spills.

/// Shared memory that a block may use in all, static and dynamic: what Orin's largest configuration leaves a block.
pub const SHARED_BYTES_MAX: u32 = 101_376;

/// One kernel on one architecture.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Usage {
    /// The kernel.
    pub kernel: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Static shared memory of a block.
    pub shared_bytes: u32,
    /// Stack and spills of a thread.
    pub local_bytes: u32,
}

/// Reads the lines that `--ptxas-options=-v` makes: an entry function's name, then its stack, then its registers.
pub fn read(log: &str) -> Vec<Usage> {
    let mut all: Vec<Usage> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap_or(rest).to_owned();
            all.push(Usage { kernel, ..Usage::default() });
        }
        let Some(last) = all.last_mut() else { continue };
        for part in line.split(',') {
            let number = |what: &str| -> Option<u32> {
                part.split_once(what)?.0.split_whitespace().last()?.parse().ok()
            };
            if let Some(n) = number(" registers") {
                last.registers = n;
            }
            if let Some(n) = number(" bytes smem") {
                last.shared_bytes = n;
            }
            for what in [" bytes stack frame", " bytes spill stores", " bytes spill loads"] {
                last.local_bytes += number(what).unwrap_or(0);
            }
        }
    }
    all
}

#[test]
fn the_assemblers_lines_are_read() {
    let log = "ptxas info    : 0 bytes gmem\n\
        ptxas info    : Compiling entry function 'gemv_r1' for 'sm_87'\n\
        ptxas info    : Function properties for gemv_r1\n\
            0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
        ptxas info    : Used 34 registers, used 1 barriers, 1536 bytes smem, 504 bytes cmem[0]\n\
        ptxas info    : Compiling entry function 'b' for 'sm_87'\n\
            8 bytes stack frame, 240 bytes spill stores, 12 bytes spill loads\n\
        ptxas info    : Used 255 registers";
    let one = |k: &str, registers, shared_bytes, local_bytes| Usage {
        kernel: k.into(),
        registers,
        shared_bytes,
        local_bytes,
    };
    assert_eq!(read(log), [one("gemv_r1", 34, 1536, 0), one("b", 255, 0, 260)]);
}
