# cmake -DNVCC= -DSOURCE= -DOBJECT= -DFLAGS= -P nvcc.cmake: compiles one file, keeps the compiler's report beside the
# object, and refuses kernels that spill registers or whose matrix instructions the compiler serialised.
separate_arguments(FLAGS)
execute_process(COMMAND ${NVCC} ${FLAGS} -Xptxas=-v -c ${SOURCE} -o ${OBJECT}
    RESULT_VARIABLE result OUTPUT_VARIABLE report ERROR_VARIABLE report)
file(WRITE ${OBJECT}.ptxas "${report}")
if(NOT result EQUAL 0)
    message(FATAL_ERROR "${report}")
endif()
string(REGEX MATCH "[1-9][0-9]* bytes spill[^\n]*" spill "${report}")
string(REGEX MATCH "[^\n]*serialized[^\n]*" serialized "${report}")
string(REGEX MATCH "[^\n]*setmaxnreg ignored[^\n]*" ignored "${report}")
if(spill OR serialized OR ignored)
    file(REMOVE ${OBJECT})
    message(FATAL_ERROR "${SOURCE}: ${spill} ${serialized} ${ignored}")
endif()
