/* A CUDA driver with one device that computes nothing, for what `embed doctor` does with a driver. FAKE_CUDA_RELEASE,
 * FAKE_CUDA_DEVICES, FAKE_CUDA_CAPABILITY and FAKE_CUDA_LOAD (what loading a module returns) say how it behaves. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = number("FAKE_CUDA_RELEASE", 13000); return 0; }
int cuDeviceGetCount(int *count) { *count = number("FAKE_CUDA_DEVICES", 1); return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "Fake GPU", size); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 16000000000; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    int capability = number("FAKE_CUDA_CAPABILITY", 90);
    *value = attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : 1;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuMemGetInfo_v2(size_t *free_bytes, size_t *bytes) { *free_bytes = 15000000000; *bytes = 16000000000; return 0; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = (void *)1; return 0; }
int cuStreamSynchronize(void *stream) { return 0; }
int cuStreamDestroy_v2(void *stream) { return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return number("FAKE_CUDA_LOAD", 0); }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = (void *)1;
    return strcmp(name, "trial") ? 500 : 0;
}
int cuModuleUnload(void *module) { return 0; }
int cuLaunchKernelEx(const void *config, void *function, void **arguments, void **extra) { return 0; }
/* NVRTC looks for it, and does without. */
int cuGetExportTable(const void **table, const void *id) { *table = NULL; return 500; }
int cuGetErrorString(int error, const char **text) { *text = "an error of the fake"; return 0; }

/* How the bindings find every other function; the current names of some end in _v2. */
int cuGetProcAddress_v2(const char *name, void **function, int release, unsigned long long flags, int *status) {
    char current[128] = {0};
    strncpy(current, name, sizeof current - 4);
    void *self = dlopen("libcuda.so.1", RTLD_LAZY);
    *function = dlsym(self, name);
    if (!*function) *function = dlsym(self, strcat(current, "_v2"));
    if (status) *status = *function ? 0 : 1;
    return 0;
}
