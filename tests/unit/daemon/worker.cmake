# Parts of mok-worker that need no process.
foreach(part fairness validate bind cancel)
    mok_add_test(NAME unit_worker_${part} LABEL unit TIMEOUT 20 SOURCES worker_${part}.c LIBRARIES mok_worker_core)
endforeach()
