// One launch as a program, for the sanitized build: an error ends this process and not the test's. Its argument is the
// kernel's library. Each buffer is an allocation of its exact size. The launch comes on stdin and the buffers go back
// on stdout, as harness.py packs them.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cusim_runtime.h"

namespace {

template <class Value>
Value read_value() {
    Value value;
    if (fread(&value, sizeof value, 1, stdin) != 1) exit(2);
    return value;
}

struct Buffer {
    size_t num_bytes;
    void* bytes;
};

Buffer read_buffer() {
    Buffer buffer{read_value<uint64_t>(), nullptr};
    buffer.bytes = malloc(buffer.num_bytes);
    if (fread(buffer.bytes, 1, buffer.num_bytes, stdin) != buffer.num_bytes) exit(2);
    return buffer;
}

struct Argument {
    uint64_t words[cusim::TENSOR_MAP_BYTES / sizeof(uint64_t)];
};

}  // namespace

int main(int, char** paths) {
    void* library = dlopen(paths[1], RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    auto* entry = static_cast<const cusim::Entry*>(dlsym(library, "cusim_entry"));
    auto shape = read_value<cusim::LaunchShape>();
    std::vector<Buffer> buffers(read_value<uint32_t>());
    for (Buffer& buffer : buffers) buffer = read_buffer();

    // An argument is its kind and its bytes. Of all but i and f the first 8 are a buffer's index, not yet its address.
    std::vector<Argument> values(read_value<uint32_t>());
    std::string kinds;
    std::vector<void*> arguments;
    for (Argument& value : values) {
        kinds += read_value<char>();
        size_t num_bytes = kinds.back() == 'm' ? sizeof value : sizeof value.words[0];
        if (fread(value.words, 1, num_bytes, stdin) != num_bytes) exit(2);
        if (kinds.back() != 'i' && kinds.back() != 'f') {
            value.words[0] = reinterpret_cast<uint64_t>(buffers.at(value.words[0]).bytes);
        }
        arguments.push_back(&value);
    }

    std::string error = cusim::launch(*entry, shape, kinds.c_str(), arguments.data());
    if (!error.empty()) {
        fprintf(stderr, "%s\n", error.c_str());
        return 1;
    }
    for (const Buffer& buffer : buffers) fwrite(buffer.bytes, 1, buffer.num_bytes, stdout);
    return 0;
}
