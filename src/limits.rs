//! Every `*_MAX`, each with its reason. A length from a file or a socket is compared with one of these (or with
//! the file's own size) before it is used.

/// Tensors in one model. DeepSeek-V3 with unfused experts has about 91,000.
pub const TENSORS_MAX: u64 = 400_000;
/// Metadata entries in a GGUF. Real files have under 100.
pub const META_ENTRIES_MAX: u64 = 65_536;
/// Elements of one GGUF metadata array. Vocabularies reach 262,144; merges about 500,000.
pub const META_ARRAY_MAX: u64 = 4_194_304;
/// Bytes of one metadata string (chat templates reach 20 KB; a tokenizer.json embedded whole about 20 MB).
pub const META_STRING_MAX: u64 = 64 << 20;
/// Bytes of a GGUF's metadata in all. The largest real vocabularies take about 20 MB; an embedded tokenizer.json 35.
pub const META_BYTES_MAX: u64 = 256 << 20;
/// Bytes of a safetensors header; the reference implementation's cap is 100 MB.
pub const SAFETENSORS_HEADER_MAX: u64 = 100_000_000;
/// Bytes of a JSON side file (config, index, tokenizer). The largest published tokenizer.json is about 35 MB.
pub const JSON_FILE_MAX: u64 = 128 << 20;
/// Bytes of a Hugging Face config.json, generation_config.json or tokenizer_config.json. The largest published ones are
/// under 1.5 MB, and a parsed JSON value can take tens of times its text.
pub const CONFIG_FILE_MAX: u64 = 2 << 20;
/// Bytes of a chat template. Published ones reach 30 KB.
pub const TEMPLATE_FILE_MAX: u64 = 1 << 20;
/// Dimensions of one tensor, as in GGUF.
pub const DIMS_MAX: usize = 4;
/// Files of one split model. DeepSeek-V3 in FP8 has 163.
pub const SHARDS_MAX: usize = 4_096;
/// Layers. The deepest published decoder has 126.
pub const LAYERS_MAX: usize = 1_024;
/// Routed experts in a layer. Published models reach 512.
pub const EXPERTS_MAX: usize = 4_096;
/// Experts a token may pick in a layer: the router keeps its picks in a fixed array of this size.
pub const EXPERTS_PICKED_MAX: usize = 64;
/// Width of any matrix, in elements: bounds every product of two dimensions below 2^63.
pub const WIDTH_MAX: usize = 1 << 28;
/// Tokens in one vocabulary.
pub const VOCAB_MAX: usize = 1 << 24;
/// Positions a model may claim; the KV plan, not this, decides what fits.
pub const CONTEXT_MAX: usize = 1 << 24;
/// Worker threads of the CPU team.
pub const THREADS_MAX: usize = 256;
/// Microseconds that an idle worker may spin: a second, beyond which it is no more idle than a busy one.
pub const SPIN_US_MAX: u64 = 1_000_000;
/// Rows of one step: bounds scratch.
pub const STEP_ROWS_MAX: usize = 8_192;
/// Bytes of one chat template. The largest published ones are about 30 KB.
pub const TEMPLATE_BYTES_MAX: usize = 1 << 20;
/// Work of one template run, in minijinja's fuel: an instruction, or 64 bytes made. The longest published template spends
/// about 400 on a message, so this is thousands of messages; it bounds time to under a second and what it makes to 64 MB.
pub const TEMPLATE_FUEL_MAX: u64 = 1_000_000;
/// Stack of a template run: room to drop the deepest value that fuel can nest.
pub const TEMPLATE_STACK_BYTES: usize = 256 << 20;
/// Bytes that a template may write: far more than any context holds.
pub const TEMPLATE_OUTPUT_MAX: usize = 64 << 20;
/// Stop strings of one request: each is looked for in every piece of text.
pub const STOPS_MAX: usize = 64;
/// Bytes of one stop string: text as long as the longest is held back from the reader.
pub const STOP_BYTES_MAX: usize = 4_096;
/// Bytes of a session file's header: five short fields.
pub const SESSION_HEADER_MAX: u32 = 4_096;
/// Bytes of cold blocks that wait to be written to the spill file: a few of the largest models' blocks, and less than a
/// tenth of a second of NVMe.
pub const SPILL_QUEUE_BYTES_MAX: usize = 32 << 20;
/// The same of a session that is being saved.
pub const SAVE_QUEUE_BYTES_MAX: usize = 32 << 20;
/// Bytes of a session's name, which is part of a file name.
pub const SESSION_NAME_MAX: usize = 64;
/// Sessions held at once: each holds its tokens, and blocks of the cache that are written to disk rather than forgotten.
pub const SESSIONS_MAX: usize = 1_024;
/// Bytes of one grammar or JSON schema of a request. The longest published schemas that are used so are under 100 KB.
pub const GRAMMAR_BYTES_MAX: usize = 256 << 10;
/// Brackets of a grammar inside one another: its parsers recurse.
pub const GRAMMAR_DEPTH_MAX: usize = 200;
/// Bytes of a power profile's file. The longest of ours has under 2 KB, comments included.
pub const PROFILE_BYTES_MAX: u64 = 64 << 10;
/// Bytes of a recording that a report is made of: a week of two samples a second.
pub const RECORDING_BYTES_MAX: u64 = 256 << 20;
/// Columns of a recording: 16, and one for each rail and zone. Boards have some twenty of these.
pub const RECORDING_COLUMNS_MAX: usize = 128;
